"""MagicPIG's claims on speed, losses and answers, after those on errors.

Losses are in nats per token, minus those of full attention, with two standard errors over
stretches.
"""

from __future__ import annotations

from jaxkv.evals.lib.claim import (
    UNSEEN,
    Claim,
    Finding,
    Results,
    adder,
    by_all,
    grade,
    joined,
    listed,
    percent,
    pick,
    spread,
)
from jaxkv.evals.lib.measured_on import RANDOM
from jaxkv.evals.magicpig.error_claims import ERRORS, METHODS
from jaxkv.evals.tasks.report import LOSS, cases

COUNTED = "measured, no claim"
MAGICPIG: list[Claim] = [*ERRORS]
claim = adder(MAGICPIG)


@claim("lookup", "Attention by hash tables is faster",
       "1.5 to 5 times the throughput, caches on a CPU")  # fmt: skip
def faster(r: Results) -> Finding:
    """Attention alone, on a CPU."""
    shown = joined(
        f"{int(tokens):,} tokens: {spread(found['times_faster'])}, reading "
        f"{found['share_read']:.1%} of the bytes, {found['share_attended']:.1%} of the keys, "
        f"tables built in {found['seconds_to_make_tables']['median']:.1f} s and rebuilt in "
        f"{found['seconds_to_rebuild_tables']['median']:.1f} s per KV head"
        for tokens, found in r["sizes"].items()
    )
    return (
        f"one KV head with {r['group']} query heads on a CPU, speed over the best dense form; "
        f"{shown}"
    ), by_all([x > 1.5 for x in pick(r, "sizes/*/times_faster/median").values()])


def of_loss(x: Results) -> str:
    return f"{x['mean']:+.3f} ± {x['two_errors']['stretches']:.3f}"


FEW = "RULER 86.4 of 88.7, LongBench 70.3 of 71.2"
LITTLE = (
    "With few keys (2 % in the paper), the loss rises by less than a tenth of its rise without any "
    "key between the ends"
)
FACTS = "Facts of a prompt are recalled, and more often than with Quest"
LESS, BY_QUEST = "At equal shares, the loss rises less than with Quest", "RULER 87.6 against 82.1"


@claim("sparse_135m", LITTLE, FEW)
@claim("sparse_135m_4096", LITTLE, FEW)
@claim("sparse_135m_7680", LITTLE, FEW)
def little_is_lost(r: Results) -> Finding:
    """At each share; the smallest share decides."""
    shown, small = [], []
    for name, found in r["perplexity"].items():
        nothing = found["ends alone"]["over_full"]
        lines = pick(found, "shares/*/magicpig/over_full")
        shown.append(
            f"{name}, prompts of {found['prompt']:,} tokens, full {found['full']['loss']:.3f}, "
            f"the ends alone {of_loss(nothing)}, "
            f"magicpig {listed({percent(share): x for share, x in lines.items()}, of_loss)}"
        )
        small.append([
            x["mean"] + x["two_errors"]["stretches"] < 0.1 * nothing["mean"] for x in lines.values()
        ])  # fmt: skip
    return joined(shown), grade(all(each[0] for each in small), any(map(any, small)))


@claim("sparse_135m", LESS, BY_QUEST)
@claim("sparse_135m_4096", LESS, BY_QUEST)
@claim("sparse_135m_7680", LESS, BY_QUEST)
def less_than_others(r: Results) -> Finding:
    lines = {
        f"{name}, prompts of {found['prompt']:,} tokens, {percent(share)}":
            {kind: variants[kind]["over_full"] for kind in (*METHODS, "topp") if kind in variants}
        for name, found in r["perplexity"].items() for share, variants in found["shares"].items()
    }  # fmt: skip
    better = [x["magicpig"]["mean"] < x["quest"]["mean"] for x in lines.values()]
    return joined(f"{name}: {listed(x, of_loss)}" for name, x in lines.items()), by_all(better)


@claim("tasks", FACTS, BY_QUEST)
@claim("tasks_4096", FACTS, BY_QUEST)
@claim("tasks_2048", FACTS, BY_QUEST)
def answers(r: Results) -> Finding:
    """Right answers where full attention passes the gate, by budget."""
    shown, good = [], []
    for task, length, found in cases(r):
        for ratio, rows in found["ratios"].items() if found["scored"] else ():
            right = {n: rows[n]["score"] for n in (*METHODS, "topp") if n in rows}
            full, own = found["full"]["score"], right["magicpig"]
            shown.append(
                f"{task}, {int(length):,} tokens, {100 * float(ratio):g}%: full {full:.0%}, "
                f"{listed(right, '{:.0%}'.format)}"
            )
            good.append(right["quest"] < own > full - LOSS)
    text = f"{r['samples']} samples, right answers; {joined(shown)}"
    return (text, by_all(good)) if good else (text, UNSEEN)


@claim("sparse_tokens", "MagicPIG stores every token and hash tables", "not claimed",
       model=f"{RANDOM} (110M)")  # fmt: skip
def of_bytes(r: Results) -> Finding:
    """Bytes of the caches, tables included, over those of full attention."""
    over = {
        f"{int(size):,} tokens": found["state_bytes"]["magicpig"] / found["state_bytes"]["full"]
        for size, found in r.items()
    }
    return f"bytes over those of full: {listed(over)}", COUNTED


@claim("sparse_tokens", "Decoding is faster after long prompts", "1.5 to 5 times the throughput",
       model=f"{RANDOM} (110M)")  # fmt: skip
def written_faster(r: Results) -> Finding:
    return joined(
        f"{int(size):,} tokens, {found['layers']} of {found['of']} layers: "
        f"{listed(pick(found, 'tokens_per_second/*/median'))} tokens per second, "
        f"{spread(found['times_faster'])} times, {found['share_attended']['mean']:.1%} of the keys "
        f"attended, indexed in {found['seconds_to_index']:.0f} s"
        for size, found in r.items()
    ), by_all([x >= 1.5 for x in pick(r, "*/times_faster/median").values()])


MAGICPIG.append(
    Claim("The published scores on RULER and LongBench", "RULER 86.4 of 88.7", "",
          "an 8B model, RULER and LongBench")
)  # fmt: skip
