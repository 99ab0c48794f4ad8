"""The claims of reservoir sampling and of BalanceKV: what the records say of each.

Verdicts are of the papers' own variants; ours, stratified and weighted uniform sampling stand
beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import mean

from jaxkv.evals.lib.claim import HOLDS, NOT, PART, Claim, Finding, Results, by_all

ACCEPTED = 119.9  # chi-square with 63 degrees of freedom exceeds it once in ten thousand times
FELT = 0.05  # of all answers: a difference that counts as one
OURS = "the model of our own"


def equally_likely(r: Results) -> Finding:
    """By the equations, and by the listing as it runs: anew over what is left, at every token."""
    (found,) = (told for told in r["reservoir"].values() if "geometric" in told)
    fair, listed = found["uniform"] < ACCEPTED, found["geometric"] < ACCEPTED
    return (
        f"of {found['tokens']} tokens {found['sample']}, {found['seeds']:,} times, chi-square with "
        f"{found['tokens'] - 1} degrees of freedom: the equations (`scheme=uniform`) "
        f"{found['uniform']:.0f}, the listing as it runs (`scheme=geometric`) "
        f"{found['geometric']:,.0f}",
        HOLDS if fair and listed else PART if fair else NOT,
    )


def as_fast(r: Results) -> Finding:
    told = {name: r["token"]["ratio"][name] for name in ("reservoir", "stratified")}
    read = {name: line["tokens_per_second"] for name, line in r["worth"]["caches"].items()}
    reading = {name: read["streaming"] / read[name] for name in told}
    return (
        f"{OURS} on a CPU, {r['token']['slots']} slots, time of a token that is written over that "
        f"of streaming: {listed(told, of_spread)}; of one that is read, {r['worth']['chunk']} at a "
        f"time: {listed(reading)}",
        HOLDS if told["reservoir"]["median"] <= 1.05 else NOT,
    )


def loses_nothing(r: Results) -> Finding:
    """The loss on books without end; no claim of the paper, which measured none."""
    told = {name: line["over_streaming"] for name, line in r["worth"]["caches"].items()}
    base = told.pop("streaming") and mean(r["worth"]["caches"]["streaming"]["blocks"])
    shown = listed(told, lambda x: f"{x['mean']:+.2%} ± {2 * x['standard_error']:.2%}")
    return (
        f"{OURS}, {r['worth']['tokens']:,} tokens of books that it has not seen, equal bytes; loss "
        f"of streaming {base:.4f}, of others over it, ± two standard errors over blocks: {shown}",
        HOLDS if sure(told["reservoir"]) < 0 else NOT,
    )


def sure(over: Mapping[str, float]) -> float:
    """What a loss over another is at the most, within two standard errors."""
    return over["mean"] + 2 * over["standard_error"]


def remembers(r: Results) -> Finding:
    """Right answers to what was said farther back than the window, beside streaming."""
    names = (
        *("full", "streaming", "reservoir", "reservoir, geometric", "reservoir, weighted"),
        *("stratified", "balance-stream", "h2o"),
    )
    far, near = beyond(r, names), within(r, ("streaming", "reservoir"))
    better = [min(far[name]) > max(far["streaming"]) + FELT for name in names[2:4]]
    return (
        f"{about(r)}: {listed(far, of_seeds)}; of nearer ones: {listed(near, of_seeds)}",
        by_all(better),
    )


def larger_is_better(r: Results) -> Finding:
    shown, rises = [], {}
    for kind in ("reservoir", "stratified"):
        names = {16: f"{kind}, sample 16", 64: kind, 256: f"{kind}, sample 256"}
        right = beyond(r, names.values())
        shown += [f"{kind} {size}: {of_seeds(right[name])}" for size, name in names.items()]
        means = [mean(right[name]) for name in names.values()]
        rises[kind] = [a + FELT < b for a, b in pairwise(means)]
    of_paper = rises["reservoir"]
    return f"{about(r)}; {', '.join(shown)}", by_all(of_paper)


def in_small(r: Results) -> Finding:
    """Methods that thin a prompt, and streaming that never held it whole."""
    right = beyond(r, (*r["thinned"], "streaming"), least=16)
    others = [mean(right[n]) for n in ("uniform", "snapkv", "pyramidkv", "streaming")]
    ours = mean(right["balance"])
    return (
        f"associative recall, prompts of {r['context'] - 8} tokens thinned to {r['left']} before "
        f"they are asked (streaming: {r['slots']}), right answers at all distances, "
        f"{seeds(r)}: {listed(right, of_seeds)}",
        HOLDS if ours > max(others) + FELT else PART if ours > min(others) + FELT else NOT,
    )


def beyond(r: Results, names: Iterable[str], least: int = 0) -> dict[str, list[float]]:
    """Of each seed the share of right answers over all distances beyond the window, or `least`."""
    first = least or r["slots"] + 1
    return {
        name: [
            mean(x for distance, x in found["within"][name]["right"].items()
                 if int(distance) >= first)
            for found in r["seeds"].values()
        ]
        for name in names
    }  # fmt: skip


def within(r: Results, names: Iterable[str]) -> dict[str, list[float]]:
    return {
        name: [
            mean(x for distance, x in found["within"][name]["right"].items()
                 if int(distance) <= r["slots"])
            for found in r["seeds"].values()
        ]
        for name in names
    }  # fmt: skip


def about(r: Results) -> str:
    return (
        f"associative recall, {r['slots']} slots, right answers to facts more than {r['slots']} "
        f"tokens back, {seeds(r)}"
    )


def seeds(r: Results) -> str:
    return f"mean (least to most) of {len(r['seeds'])} trained models"


PAPERS = ("balance, walk", "balance, near the published code")
OTHERS = ("balance, pairs", "stratified", "uniform, weighted", "uniform", "snapkv")


def nearer_than_uniform(r: Results) -> Finding:
    """Figure 3, with stratified and weighted uniform sampling beside it."""
    parts = []
    for rounds in map(str, r["rounds"]):
        line = {name: r["summary"][name][rounds]["median"] for name in (*PAPERS, *OTHERS)}
        parts.append(f"T={rounds}: {listed(line, '{:.3f}'.format)}")
    uniform = below(r, PAPERS[0], ("uniform, weighted", "uniform"))
    stratified = below(r, PAPERS[0], ("stratified",))
    certain = listed(r["saturated"], "{:.0%}".format)
    text = (
        f"{OURS}, {r['stretches']} stretches of {r['tokens']:,} tokens, layers "
        f"{', '.join(r['layers'])}; relative error; {'; '.join(parts)}; steps of a walk that left "
        f"nothing to chance: {certain}; of {len(uniform)} pairs of layer and T the walk of the "
        f"worst seed is nearer than the best of both uniform samplings in {sum(uniform)}, than the "
        f"best of stratified in {sum(stratified)}"
    )
    every = uniform + stratified
    return text, HOLDS if all(every) else PART if any(uniform) else NOT


def below(r: Results, name: str, others: tuple[str, ...]) -> list[bool]:
    """Of each layer and T whether the worst seed of a method is nearer than the best of others."""
    return [
        max(layer[name][rounds]) < min(min(layer[other][rounds]) for other in others)
        for layer in r["layers"].values()
        for rounds in map(str, r["rounds"])
    ]


def nearer_on_paper(r: Results) -> Finding:
    ratios = {named(test): told["ratio"] for test, told in r["halving"].items() if "ratio" in told}
    walk = max(x for test, x in ratios.items() if test.startswith("walk"))
    theory = max(x for test, x in ratios.items() if test.startswith("theory"))
    return (
        "an autoregression in order and mixed, error over that of weighted uniform sampling (coin: "
        f"stratified): {listed(ratios)}; a test holds them",
        HOLDS if walk < 0.9 and theory < 0.9 else PART if walk < 0.9 else NOT,
    )


def falls_faster(r: Results) -> Finding:
    found = {named(test): line for test, line in r["levels"].items() if "slope" in line}
    first = next(iter(found.values()))
    (lost,) = (line for line in r["levels"].values() if "denominator_lost" in line)
    slopes = {name: line["slope"] for name, line in found.items()}
    practical, theory = slopes["walk"] < -0.75, slopes["theory"] < -0.75
    return (
        f"{first['tokens']:,} vectors of unit length, slope of log error by log memory (coin: "
        f"stratified): {listed(slopes)}, uniform sampling {first['slope_of_uniform']:.2f}; a test "
        f"holds them; of {lost['tokens']} tokens Algorithm 3 with the theorem's constant loses "
        f"{lost['denominator_lost']:.0%} of the denominator, for it keeps the smaller class",
        HOLDS if practical and theory else PART if practical else NOT,
    )


def named(test: str) -> str:
    """What stands in the brackets of a test's name."""
    return test[test.index("[") + 1 : -1]


def listed(values: Mapping[str, object], show=lambda x: f"{x:.2f}") -> str:
    return ", ".join(f"{name} {show(x)}" for name, x in values.items())


def of_spread(x: Mapping[str, float]) -> str:
    return f"{x['median']:.2f} ({x['min']:.2f} to {x['max']:.2f})"


def of_seeds(x: list[float]) -> str:
    return f"{mean(x):.2f}" + (f" ({min(x):.2f} to {max(x):.2f})" if len(x) > 1 else "")


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
    Claim("The same in small", "not claimed", "recall", in_small),
]  # fmt: skip
