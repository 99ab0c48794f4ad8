"""The claims of reservoir sampling and of BalanceKV: what the records say of each."""

from __future__ import annotations

from itertools import pairwise

from evals.claim import HOLDS, NOT, PART, Claim, Finding, Results

ACCEPTED = 119.9  # chi-square with 63 degrees of freedom exceeds it once in ten thousand times
FELT = 0.05  # of all answers: a difference that counts as one
BY_CHANCE = "of 64 tokens 8, 4,000 times, chi-square with 63 degrees of freedom"


def equally_likely(r: Results) -> Finding:
    """By the equations, and by the listing as it runs: anew over what is left, at every token."""
    (found,) = r["reservoir"].values()
    fair, listed = found["uniform"] < ACCEPTED, found["geometric"] < ACCEPTED
    return (
        f"{BY_CHANCE}: the equations (`scheme=uniform`) {found['uniform']:.0f}, the listing as it "
        f"runs (`scheme=geometric`) {found['geometric']:,.0f}",
        HOLDS if fair and listed else PART if fair else NOT,
    )


def as_fast(r: Results) -> Finding:
    told = {name: r["token"]["ratio"][name] for name in ("reservoir", "stratified")}
    shown = ", ".join(f"{n} {x['median']:.2f} ({x['min']:.2f} to {x['max']:.2f})"
                      for n, x in told.items())  # fmt: skip
    return (
        f"the model of our own on a CPU, {r['token']['slots']} slots, time of a token over that of "
        f"streaming: {shown}",
        HOLDS if told["reservoir"]["median"] <= 1.05 else NOT,
    )


def loses_nothing(r: Results) -> Finding:
    """The loss on books without end; no claim of the paper, which measured none."""
    caches = r["worth"]["caches"]
    base = caches["streaming"]["loss"]
    shown = ", ".join(f"{name} {line['loss']:.4f} ({line['loss'] / base - 1:+.2%})"
                      for name, line in caches.items())  # fmt: skip
    return (
        f"the model of our own, {r['worth']['tokens']:,} tokens of books, equal bytes, loss: "
        f"{shown}",
        HOLDS if caches["reservoir"]["loss"] < base else NOT,
    )


def remembers(r: Results) -> Finding:
    """Right answers to what was said farther back than the window, beside streaming."""
    shown, better = [], []
    for name in ("full", "streaming", "reservoir", "stratified", "balance-stream"):
        right = past(r, name)
        shown.append(f"{name} {right:.2f}")
        better.append(right)
    text = f"{about(r)}: {', '.join(shown)}"
    _, streaming, reservoir, *_ = better
    return text, HOLDS if reservoir > streaming + FELT else NOT


def larger_is_better(r: Results) -> Finding:
    names = [name for name in r["policies"] if name.startswith("reservoir, sample ")]
    names.sort(key=lambda name: int(name.split()[-1]))
    right = [past(r, name) for name in names]
    shown = ", ".join(f"{n.split(', ')[1]} {x:.2f}" for n, x in zip(names, right, strict=True))
    rises = all(a + FELT < b for a, b in pairwise(right))
    grown = right[0] + FELT < right[-1]
    return f"{about(r)}: {shown}", HOLDS if rises else PART if grown else NOT


def past(r: Results, name: str) -> float:
    """The share of right answers over all distances beyond the window, and all seeds."""
    found = [
        share
        for seed in r["seeds"].values()
        for distance, share in seed["within"][name]["right"].items()
        if int(distance) > r["slots"]
    ]
    return sum(found) / len(found)


def about(r: Results) -> str:
    return (
        f"associative recall, {r['slots']} slots, right answers to facts more than {r['slots']} "
        f"tokens back, seeds: {len(r['seeds'])}"
    )


def nearer_than_uniform(r: Results) -> Finding:
    """Figure 3, with stratified and weighted uniform sampling beside it."""
    names = (
        "balance, pairs",
        "balance, walk",
        "stratified",
        "uniform, weighted",
        "uniform",
        "snapkv",
    )
    parts, held, beyond = [], [], []
    for rounds in map(str, r["rounds"]):
        line = {name: r["summary"][name][rounds]["median"] for name in names}
        parts.append(f"T={rounds}: " + ", ".join(f"{name} {x:.3f}" for name, x in line.items()))
        held.append(below(r, "balance, pairs", ("uniform, weighted", "uniform"), rounds))
        beyond.append(below(r, "balance, pairs", ("stratified",), rounds))
    sure = ", ".join(f"{mode} {share:.0%}" for mode, share in r["saturated"].items())
    text = (
        f"the model of our own, {r['tokens']:,} tokens; relative error; " + "; ".join(parts)
        + f"; steps of a walk that left nothing to chance: {sure}"
    )  # fmt: skip
    if all(held) and not any(beyond):
        return text + "; by no more than stratified sampling", PART
    return text, HOLDS if all(held) else PART if any(held) else NOT


def below(r: Results, name: str, others: tuple[str, ...], rounds: str) -> bool:
    """Whether the worst seed of a method is nearer than the best of others."""
    line = {name: r["summary"][name][rounds] for name in (name, *others)}
    return line[name]["max"] < min(line[other]["min"] for other in others)


def nearer_on_paper(r: Results) -> Finding:
    ratios = {name: found["ratio"] for name, found in r["halving"].items() if "ratio" in found}
    shown = ", ".join(f"{test[test.index('[') + 1 : -1]} {x:.2f}" for test, x in ratios.items())
    ours = [x for test, x in ratios.items() if "walk" in test or "pairs" in test]
    theirs = [x for test, x in ratios.items() if "theory" in test]
    better = max(ours) < 0.9
    return (
        f"an autoregression in order and mixed, error over that of uniform sampling: {shown}",
        HOLDS if better and max(theirs) < 0.9 else PART if better else NOT,
    )


def falls_faster(r: Results) -> Finding:
    found = {test: line for test, line in r["levels"].items() if "slope" in line}
    shown = ", ".join(f"{test[test.index('[') + 1 : -1]} {line['slope']:.2f}"
                      for test, line in found.items())  # fmt: skip
    chance = next(iter(found.values()))["slope_of_uniform"]
    (lost,) = [
        line["denominator_lost"] for line in r["levels"].values() if "denominator_lost" in line
    ]
    named = lambda name: next(line["slope"] for test, line in found.items() if name in test)  # noqa: E731
    practical, theory = named("[walk]") < -0.75, named("[theory]") < -0.75
    return (
        f"8,192 vectors of unit length, slope of log error by log memory: {shown}, uniform "
        f"sampling {chance:.2f}; of 512 tokens Algorithm 3 with the theorem's constant loses "
        f"{lost:.0%} of the denominator, for it keeps the smaller class",
        HOLDS if practical and theory else PART if practical else NOT,
    )


RESERVOIR = [
    Claim("Every token that left the window is equally likely to be in the sample",
          "equations 1 and 2, Figure 4", "known_answers", equally_likely),
    Claim("A sample of what is evicted improves long-term memory", "sections 6 and 7, no figure",
          "recall", remembers),
    Claim("A larger sample improves the answer", "section 6, no figure",
          "recall", larger_is_better),
    Claim("The loss is lower than StreamingLLM's", "not claimed", "sampled", loses_nothing),
    Claim("Efficiency does not decline", "section 7, no figure", "sampled", as_fast),
]  # fmt: skip
BALANCE = [
    Claim("Balanced tokens are nearer to attention than uniform samples of as many",
          "Figure 3, Llama-3.1-8B and Ministral-8B", "single_layer", nearer_than_uniform),
    Claim("The same on vectors whose law is known", "theorem 3.1",
          "known_answers", nearer_on_paper),
    Claim("The error falls as 1/t with the memory t, not as 1/sqrt t", "theorem 3.1",
          "known_answers", falls_faster),
    Claim("End to end it beats StreamingLLM, SnapKV, PyramidKV and uniform sampling",
          "Table 1, LongBench-E, 25 %: 44.99 against 42.51, 44.57, 44.03, 44.82", "",
          "an 8B model and LongBench"),
]  # fmt: skip
