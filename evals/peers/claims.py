"""Claims about prompt compression, with kvpress on the same weights beside jaxkv."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.evals.lib.claim import UNSEEN, Claim, Finding, Results, adder, by_all, grade, joined
from jaxkv.evals.lib.record import standard_error
from jaxkv.evals.peers.cases import BUDGETS, ENDS

PEERS: list[Claim] = []
claim = adder(PEERS)
BAR = 0.02  # nats


def shown(one: dict[str, Any]) -> str:
    error = one["standard_error"]
    return f"{one['mean']:+.4f}" + ("" if error is None else f" ± {2 * error:.4f}")


def setting(r: Results) -> str:
    lengths = " and ".join(f"{int(n):,}" for n in r["prompts"])
    return f"{len(r['texts'])} novels, prompts of {lengths} tokens, {r['scored']} tokens scored"


def differences(r: Results, name: str) -> list[dict[str, Any]]:
    """Ours minus kvpress's, by prompt length and ratio."""
    return [
        row["difference"]
        for at in r["prompts"].values()
        for row in at["cases"].get(name, {}).values()
    ]


def listed(r: Results, name: str) -> str:
    """The differences of a case, as text."""
    found = []
    for length, at in r["prompts"].items():
        rows = at["cases"].get(name, {}).items()
        each = [f"{float(ratio):.1%} removed {shown(row['difference'])}" for ratio, row in rows]
        found.append(f"of {int(length):,} tokens " * (len(r["prompts"]) > 1) + ", ".join(each))
    return f"{name}: " + joined(found)


def same(r: Results, name: str) -> bool:
    """Whether the mean difference is within the bar at every ratio."""
    return all(abs(one["mean"]) <= BAR for one in differences(r, name))


@claim("peers", "Our `snapkv` has kvpress's loss, within 0.02 nats at each ratio", "our bar")
def snapkv(r: Results) -> Finding:
    within = [abs(one["mean"]) <= BAR for one in differences(r, "snapkv")]
    return f"{setting(r)}; ours minus kvpress's: {listed(r, 'snapkv')}", by_all(within)


@claim("peers", "`expected-attention`, `keydiff` and a prompt's ends have kvpress's loss too",
       "our bar")  # fmt: skip
def others(r: Results) -> Finding:
    names = ("expected-attention", "keydiff", ENDS)
    text = joined(listed(r, name) for name in names)
    return f"{text} (kvpress's StreamingLLM)", by_all([same(r, name) for name in names])


@claim("peers", "Our `pyramidkv` differs from kvpress's only in its budgets", "our bar")
def pyramidkv(r: Results) -> Finding:
    cached = ", ".join(
        f"{row['cached']['ours']:.0f} and {row['cached']['theirs']:.0f}"
        for at in r["prompts"].values()
        for row in at["cases"]["pyramidkv"].values()
    )
    text = joined(listed(r, name) for name in ("pyramidkv", BUDGETS))
    shown_at = dict.fromkeys(
        f"{float(x):.1%}" for at in r["prompts"].values() for x in at["cases"].get(BUDGETS, {})
    )
    return (
        f"{text}; mean tokens per layer with our budgets and with kvpress's: {cached}. kvpress "
        "caps the first layer at the prompt without the window, and where the last layer would get "
        "less than a window it gives all layers the same budget, as snapkv, so with its budgets "
        f"there is a pyramid to compare only at {' and '.join(shown_at)} removed"
    ), grade(bool(shown_at) and same(r, BUDGETS))


@claim("peers", "`streaming` reads the prompt through its window, kvpress with full attention",
       "explains the difference")  # fmt: skip
def streaming(r: Results) -> Finding:
    if not differences(r, "streaming"):
        return "not among the cases of this run", "not run here"
    clear = [
        one["standard_error"] is not None and abs(one["mean"]) > 2 * one["standard_error"]
        for one in differences(r, "streaming")
    ]
    verdict = grade(same(r, ENDS)) if any(clear) else UNSEEN
    return listed(r, "streaming"), verdict


@claim("peers", "Expected attention loses less than SnapKV, KeyDiff and StreamingLLM at each ratio",
       "Expected Attention, kvpress's board")  # fmt: skip
def expected_attention(r: Results) -> Finding:
    full = ", ".join(
        f"{sum(at['full']['losses']['ours']) / len(r['texts']):.4f}" for at in r["prompts"].values()
    )
    return compared(r, "expected-attention", ("snapkv", "keydiff", ENDS), f" ({full})")


@claim("peers", "BalanceKV's tokens of a prompt lose less than a uniform sample, SnapKV and "
       "PyramidKV", "LongBench-E, a quarter of Llama-3.1-8B's cache: 44.99, against 44.82, 44.57 "
       "and 44.03")  # fmt: skip
def balance(r: Results) -> Finding:
    return compared(r, "balance", ("uniform", "snapkv", "pyramidkv"))


def compared(r: Results, name: str, others: tuple[str, ...], full: str = "") -> Finding:
    """Our losses of a policy and of others, and whether it loses clearly less than each."""
    lines, wins = [], []
    for prompt, at in r["prompts"].items():
        for ratio in at["cases"][name]:
            over = {n: at["cases"][n][ratio]["over_full"]["ours"] for n in (name, *others)}
            for other in others:
                gaps = np.subtract(over[other]["by_text"], over[name]["by_text"])
                error = standard_error(gaps)
                wins.append(error is not None and gaps.mean() > 2 * error)
            each = ", ".join(f"{n} {shown(one)}" for n, one in over.items())
            lines.append(f"{int(prompt):,} tokens, {float(ratio):.1%} removed: {each}")
    clear = f"; clearly less than another method in {sum(wins)} of {len(wins)} comparisons"
    return f"ours over full attention{full}: {joined(lines)}{clear}", by_all(wins)


PEERS.append(
    Claim("AdaKV and KVzap lose less than SnapKV", "kvpress's board", "",
          "heads with different numbers of slots (AdaKV), and a trained scorer of keys (KVzap)")
)  # fmt: skip
PEERS.append(
    Claim("Streaming in other libraries has the same loss: the context shift of llama.cpp with "
          "--keep, and the caches of transformers", "our bar", "",
          "losses of llama.cpp beyond its context; transformers has no cache with sinks now")
)  # fmt: skip
