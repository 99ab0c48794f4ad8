"""The claims of BalanceKV.

Verdicts concern the paper's own variants. Stratified and weighted uniform sampling, added here, are
shown for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from jaxkv.evals.lib.claim import (
    Claim,
    Finding,
    Results,
    adder,
    grade,
    joined,
    listed,
    over_base,
)
from jaxkv.evals.lib.record import standard_error
from jaxkv.evals.reservoir.claims import FELT, OURS, answers, models, of_seeds

PAPERS = ("balance, walk", "balance, near the published code")
OTHERS = ("balance, pairs", "stratified", "uniform, weighted", "uniform", "snapkv")
BALANCE: list[Claim] = []
claim = adder(BALANCE)


FIGURE_3 = ("At equal budgets, balanced tokens have a lower attention error than uniform samples",
            "Figure 3, Llama-3.1-8B and Ministral-8B")  # fmt: skip


@claim("single_layer_135m", *FIGURE_3)
@claim("single_layer", *FIGURE_3)
def nearer_than_uniform(r: Results) -> Finding:
    """Figure 3, with stratified and weighted uniform sampling beside it."""
    parts = []
    for rounds in map(str, r["rounds"]):
        line = {name: of_stretches(r["by_stretch"][name][rounds]) for name in (*PAPERS, *OTHERS)}
        parts.append(f"one of {2 ** int(rounds)}: {listed(line, str)}")

    def below(*others: str) -> list[bool]:
        """For each T, whether the walk's error is surely below those of the others."""
        return [
            all(surely_below(r["by_stretch"][PAPERS[0]][T], r["by_stretch"][other][T])
                for other in others)
            for T in map(str, r["rounds"])
        ]  # fmt: skip

    uniform, stratified = below("uniform, weighted", "uniform"), below("stratified")
    model = OURS if r["model"] == "default" else r["model"]
    return (
        f"{model}, {r['stretches']} stretches of {r['tokens']:,} tokens, {len(r['layers'])} "
        f"layers; relative error ± two standard errors over the stretches, by "
        f"the share of the tokens between the ends that is cached; {joined(parts)}; walk steps "
        f"with a certain sign: {listed(r['saturated'], '{:.0%}'.format)}; of {len(uniform)} shares "
        f"the walk's error is below those of both uniform samplings by more than two standard "
        f"errors in {sum(uniform)}, and below that of stratified in {sum(stratified)}; the walk's "
        f"error over the lower one of both uniform samplings, by layer: {joined(of_layers(r))}"
    ), grade(all(uniform + stratified), any(uniform))


def of_layers(r: Results) -> Iterator[str]:
    """By share, the error of the walk over that of the better uniform sampling, of all layers."""
    for T in map(str, r["rounds"]):
        ratios = [
            mean(found[PAPERS[0]][T])
            / min(mean(found[name][T]) for name in ("uniform, weighted", "uniform"))
            for found in r["layers"].values()
        ]
        lower = sum(ratio < 1 for ratio in ratios)
        yield (
            f"one of {2 ** int(T)} {min(ratios):.2f} to {max(ratios):.2f}, below 1 in {lower} of "
            f"{len(ratios)}"
        )


def of_stretches(errors: list[float]) -> str:
    """The mean with two standard errors."""
    return f"{mean(errors):.3f} ± {2 * standard_error(errors):.3f}"


def surely_below(errors: list[float], others: list[float]) -> bool:
    """Whether the mean difference over the same stretches is more than two standard errors."""
    less = [other - one for one, other in zip(errors, others, strict=True)]
    return mean(less) > 2 * standard_error(less)


@claim("known_answers", "On vectors with a known distribution, balanced vectors have a lower error "
       "than uniform samples", "theorem 3.1")  # fmt: skip
def nearer_on_paper(r: Results) -> Finding:
    ratios = {case(test): x["ratio"] for test, x in r["halving"].items() if "ratio" in x}
    walk, theory = (max(x for test, x in ratios.items() if test.startswith(kind)) < 0.9
                    for kind in ("walk", "theory"))  # fmt: skip
    return (
        "vectors of an autoregression, in order and permuted, error over that of weighted uniform "
        "sampling "
        f"(coin: stratified): {listed(ratios)}; a test checks them"
    ), grade(walk and theory, walk)


@claim("known_answers", "The error falls as 1/t with the memory t, not as 1/sqrt t", "theorem 3.1")
def falls_faster(r: Results) -> Finding:
    slopes = {case(test): x["slope"] for test, x in r["levels"].items() if "slope" in x}
    first = next(x for x in r["levels"].values() if "slope" in x)
    (lost,) = (x for x in r["levels"].values() if "denominator_lost" in x)
    walk, theory = slopes["walk"] < -0.75, slopes["theory"] < -0.75
    return (
        f"{first['tokens']:,} vectors of unit length, slope of log error by log memory (coin: "
        f"stratified): {listed(slopes)}, uniform sampling {first['slope_of_uniform']:.2f}; a test "
        f"checks them; of {lost['tokens']} tokens Algorithm 3 with the theorem's constant loses "
        f"{lost['denominator_lost']:.0%} of the denominator, because it keeps the smaller class"
    ), grade(walk and theory, walk)


FORMER, CHOSEN = "3 x 64", "2 x 64"  # levels x block, of equal bytes


@claim("tree_slots", "A merge-and-reduce tree of two levels and a longer window use more slots of "
       "equal bytes than three levels, and the loss is lower", "not claimed")  # fmt: skip
def uses_more(r: Results) -> Finding:
    """The defaults of `balance-stream` against three levels of blocks of 64."""
    rows, error = r["rows"], r["errors"]["rows"]

    def shown(name: str) -> str:
        tree = r["trees"][name]
        return (
            f"{over_base(rows[name])[1:-1]} ({rows[name]['cached']:.0f} tokens cached, "
            f"{tree['used']:.0f} of the tree's {tree['slots']} slots in use, error "
            f"{error[f'{name}, 0']['error']:.3f}, weighted {error[f'{name}, 1']['error']:.3f})"
        )

    held = {name: row for name, row in r["equal_tokens"].items() if row["loss_over_base"]}
    pairs = (rows[name]["loss_over_base_by_text"] for name in (CHOSEN, FORMER))
    lower = [chosen < former for chosen, former in zip(*pairs, strict=True)]
    more = rows[CHOSEN]["cached"] > rows[FORMER]["cached"]
    return (
        f"{r['model']}, {len(r['texts'])} novels, {r['tokens'][1]:,} tokens of each, 256 slots per "
        "KV head for sinks, window and tree; levels x block, loss minus that of streaming of the "
        "same bytes, nats per token, ± two standard errors over novels (cache-relative positions); "
        f"error of attention in layers {', '.join(map(str, r['errors']['layers']))} (absolute "
        "positions): "
        f"{listed({name: shown(name) for name in r['trees']}, str)}; reservoir, which uses all "
        f"slots, {over_base(rows['reservoir'])[1:-1]}; error of streaming "
        f"{error['streaming']['error']:.3f}; loss minus that of streaming of as many cached "
        f"tokens: {listed(held, lambda x: over_base(x)[1:-1])}"
    ), grade(more and all(lower) and len(lower) >= 5, more and any(lower))


@claim("tree_slots", "Holes in the cache-relative positions of a sample raise the loss",
       "not claimed")  # fmt: skip
def holes_cost(r: Results) -> Finding:
    """With positions of each KV head's own cached tokens, there are no holes."""
    found = r["holes"]
    without = found["over_holes"]
    raised = -without["loss_over_base"] > 2 * without["standard_error"]
    return (
        f"{r['model']}, {len(r['texts'])} novels, balance-stream of {FORMER}: a KV head has a hole "
        f"in {found['share']:.0%} of all steps, {found['widest']} position wide; loss without "
        f"holes minus loss with them, nats per token, {over_base(without)[1:-1]}"
    ), grade(raised)


def case(test: str) -> str:
    """The parameters in the brackets of a test's name."""
    return test[test.index("[") + 1 : -1]


BALANCE.append(
    Claim("End to end BalanceKV beats StreamingLLM, SnapKV, PyramidKV and uniform sampling",
          "Table 1, LongBench-E, 25 %: 44.99 against 42.51, 44.57, 44.03, 44.82", "",
          "an 8B model and LongBench")
)  # fmt: skip


@claim("recall", "In small models BalanceKV recalls more facts than StreamingLLM, SnapKV, "
       "PyramidKV and uniform sampling", "not claimed")  # fmt: skip
def in_small(r: Results) -> Finding:
    """Policies that compress a prompt, and streaming."""
    right = answers(r, (*r["compressed"], "streaming"), lambda distance: distance >= 16)
    others = [mean(right[n]) for n in ("uniform", "snapkv", "pyramidkv", "streaming")]
    ours = mean(right["balance"])
    return (
        f"associative recall, prompts of {r['context'] - 8} tokens compressed to {r['left']} "
        f"before the question (streaming: {r['slots']}), right answers at all distances, "
        f"{models(r)}: {listed(right, of_seeds)}"
    ), grade(ours > max(others) + FELT, ours > min(others) + FELT)
