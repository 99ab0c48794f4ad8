"""MagicPIG's claims on speed, losses and answers, after those on errors.

Losses are in nats per token, minus those of full attention, with two standard errors over
stretches.
"""

from __future__ import annotations

from statistics import mean

from jaxkv.evals.lib.claim import (
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
from jaxkv.evals.lib.measured_on import DEFAULT, RANDOM, STORIES, TRAINED
from jaxkv.evals.magicpig.error_claims import ERRORS, METHODS

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
LESS, BY_QUEST = "At equal shares, the loss rises less than with Quest", "RULER 87.6 against 82.1"
SMALL = f"{DEFAULT}, {STORIES}"


@claim("sparse_135m", LITTLE, FEW)
@claim("sparse_135m_4096", LITTLE, FEW)
@claim("sparse", LITTLE, FEW, model=SMALL)
def little_is_lost(r: Results) -> Finding:
    """At each share; the smallest share decides."""
    shown, small = [], []
    for name, found in r["perplexity"].items():
        nothing = found["ends alone"]["over_full"]
        lines = pick(found, "shares/*/magicpig/over_full")
        shown.append(
            f"{name}, full {found['full']['loss']:.3f}, the ends alone {of_loss(nothing)}, "
            f"magicpig {listed({percent(share): x for share, x in lines.items()}, of_loss)}"
        )
        small.append([
            x["mean"] + x["two_errors"]["stretches"] < 0.1 * nothing["mean"] for x in lines.values()
        ])  # fmt: skip
    return joined(shown), grade(all(each[0] for each in small), any(map(any, small)))


@claim("sparse_135m", LESS, BY_QUEST)
@claim("sparse_135m_4096", LESS, BY_QUEST)
@claim("sparse", LESS, BY_QUEST, model=SMALL)
def less_than_others(r: Results) -> Finding:
    lines = {
        f"{name}, {percent(share)}":
            {kind: variants[kind]["over_full"] for kind in (*METHODS, "topp") if kind in variants}
        for name, found in r["perplexity"].items() for share, variants in found["shares"].items()
    }  # fmt: skip
    better = [x["magicpig"]["mean"] < x["quest"]["mean"] for x in lines.values()]
    return joined(f"{name}: {listed(x, of_loss)}" for name, x in lines.items()), by_all(better)


@claim("sparse", "A question that is read sparsely after prefill costs more than one that is part "
       "of the prompt", "not claimed; public scores move from 60 to 90", model=DEFAULT)  # fmt: skip
def by_question(r: Results) -> Finding:
    """Losses with the end of the prompt read densely or sparsely, and with a dense layer."""
    shown, worse = [], []
    for share in r["protocol"]["shares"]:
        lines = pick(r, f"protocol/shares/{share}/*/over_full")
        shown.append(f"{percent(share)}: {listed(lines, of_loss)}")
        worse += [
            lines[name.replace("dense", "sparse", 1)]["mean"] > x["mean"] + x["two_errors"]["seeds"]
            for name, x in lines.items() if name.startswith("question dense")
        ]  # fmt: skip
    tokens = r["protocol"]["question"]
    return f"question: the last {tokens} tokens of a prompt; {joined(shown)}", by_all(worse)


@claim("sparse", "Facts of a prompt are recalled, and more often than with Quest",
       "RULER 87.6 against 82.1", model=TRAINED)  # fmt: skip
def answers(r: Results) -> Finding:
    """Right answers; mean over distances and trained models."""
    models = list(r["recall"]["seeds"].values())

    def right(path: str) -> float:
        return mean(mean(pick(model, f"{path}/right").values()) for model in models)

    full = right("full")
    shown, good = [f"full {full:.0%}, the ends alone {right('ends alone'):.0%}"], []
    for share in models[0]["shares"]:
        by_kind = {kind: right(f"shares/{share}/{kind}") for kind in METHODS}
        shown.append(f"{float(share):.1%}: {listed(by_kind, '{:.0%}'.format)}")
        good.append(by_kind["quest"] <= by_kind["magicpig"] > 0.95 * full)
    return f"{len(models)} trained models; {joined(shown)}", by_all(good)


@claim("sparse", "MagicPIG stores every token and hash tables; evicting policies store less",
       "not claimed", model=f"{DEFAULT}, {RANDOM} (110M)")  # fmt: skip
def at_equal_bytes(r: Results) -> Finding:
    """Bytes of a prompt, tables included, and the loss of policies that evict."""
    found = next(iter(r["perplexity"].values()))
    (tokens, first), *others = r["bytes"].items()
    of_keys = {name: x["over_full"] for name, x in first.items() if "magicpig" in name}
    shown = [f"bytes over those of full, {tokens} tokens: {listed(of_keys)}"]
    shown += [f"{int(size):,} tokens of the 110M model: {x['magicpig']['over_full']:.2f}"
              for size, x in others]  # fmt: skip
    dropped = {f"{name} ({x['state_bytes'] / first['full']['state_bytes']:.2f})":
               of_loss(x["over_full"]) for name, x in found["evicting"].items()}  # fmt: skip
    shown.append(f"loss of evicting policies (bytes over full's): {listed(dropped, str)}")
    return joined(shown), COUNTED


@claim("sparse", "Decoding is faster after long prompts", "1.5 to 5 times the throughput",
       model=f"{RANDOM} (110M)")  # fmt: skip
def written_faster(r: Results) -> Finding:
    return joined(
        f"{int(size):,} tokens, {found['layers']} of {found['of']} layers: "
        f"{listed(pick(found, 'tokens_per_second/*/median'))} tokens per second, "
        f"{spread(found['times_faster'])} times, {found['share_attended']['mean']:.1%} of the keys "
        f"attended, indexed in {found['seconds_to_index']:.0f} s"
        for size, found in r["tokens"].items()
    ), by_all([x >= 1.5 for x in pick(r, "tokens/*/times_faster/median").values()])


MAGICPIG.append(
    Claim("The published scores on RULER and LongBench", "RULER 86.4 of 88.7", "",
          "an 8B model, RULER and LongBench")
)  # fmt: skip
