"""Statistical tests with known answers, as one record.

`python -m jaxkv.evals.correctness.known_answers` runs them: whether each token of a stream is
equally likely to be in a reservoir, the error of halved blocks and of uniform samples, and how the
error of merge-and-reduce decreases with its size. If a test fails, nothing is written.
"""

from __future__ import annotations

from typing import Any

from jaxkv.evals.correctness.agreement import reported_by
from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.run import Measure, Run, run
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import Results, Statement, above, below, claim

TESTS = {
    "reservoir": "tests/core/policies/test_reservoir.py",
    "halving": "tests/core/policies/test_discrepancy.py",
    "levels": "tests/core/policies/merge_reduce/test_tree.py",
}


def measure(_: Run) -> dict[str, Any]:
    """What the tests report."""
    return reported_by(TESTS)


MEASURE = Measure("known_answers", measure)
ACCEPTED = 119.9  # 99.99th percentile of chi-square with 63 degrees of freedom
PAPERS = ("walk", "theory")  # constants of the walk: practical ones, the theorem's


def chi_squares(results: Results) -> dict[str, float]:
    """How evenly tokens are drawn, by the paper's equations and by its printed pseudocode."""
    (test,) = (x for x in results["reservoir"].values() if "geometric" in x)
    return {"equations": test["uniform"], "pseudocode": test["geometric"]}


def ratios(results: Results) -> dict[str, dict[str, float]]:
    """By mode and order of the vectors, the error over that of weighted uniform sampling."""
    modes: dict[str, dict[str, float]] = {}
    for test, reported in results["halving"].items():
        if "ratio" in reported:
            mode, order = parameters(test).split("-")
            modes.setdefault(mode, {})[order] = reported["ratio"]
    return modes


def largest_ratios(results: Results) -> dict[str, float]:
    return {mode: max(ratios(results)[mode].values()) for mode in PAPERS}


def slopes(results: Results) -> dict[str, float]:
    """By mode, the slope of the log of the error by the log of the memory."""
    return {parameters(test): x["slope"] for test, x in results["levels"].items() if "slope" in x}


def slopes_of_papers(results: Results) -> dict[str, float]:
    return {mode: slopes(results)[mode] for mode in PAPERS}


def parameters(test: str) -> str:
    """The parameters in the brackets of a test's name."""
    return test[test.index("[") + 1 : -1]


RESERVOIR = (
    claim("equations 1 and 2, Figure 4",
          "Every evicted token is equally likely to be sampled: chi-square with 63 degrees of "
          "freedom is below 119.9, by the equations (`uniform`) and the pseudocode (`geometric`)",
          "known_answers", below(chi_squares, ACCEPTED), unit="count"),
)  # fmt: skip
BALANCEKV = (
    claim("theorem 3.1",
          "On vectors of a known distribution, in order and permuted, balancing has less than 0.9 "
          "times the error of weighted uniform sampling, with practical constants (walk) and the "
          "theorem's",
          "known_answers", below(largest_ratios, 0.9), unit="times"),
    claim("theorem 3.1",
          "The error falls as 1/t with the memory t, not as 1/sqrt t: the slope of their "
          "logarithms is below -0.75",
          "known_answers", below(slopes_of_papers, -0.75), unit="number"),
)  # fmt: skip


def halvings() -> str:
    """The error of each way to halve, on vectors of a known distribution."""
    results = read("known_answers")["results"]
    slope = slopes(results)
    (uniform,) = {x["slope_of_uniform"] for x in results["levels"].values() if "slope" in x}
    rows = [
        (mode, *(f"{row[order]:.2f}" for order in ("ordered", "permuted")), f"{slope[mode]:.2f}")
        for mode, row in ratios(results).items()
    ]
    heads = ("halving", "vectors in order", "permuted", "slope of the error")
    return table(heads, [*rows, ("uniform, weighted", "1", "1", f"{uniform:.2f}")])


TABLES = {"known_answers": halvings}
STATEMENTS = (
    Statement("docs/results/balancekv.md", "Algorithm 3 loses over half of the denominator",
              "known_answers", [above("levels/{test}/denominator_lost", 0.5)]),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
