"""Recall by distance: accuracy on facts n tokens back, at equal bytes.

The papers make this claim without a figure. The record's commit trains small models on streams of
facts. Every policy then reads streams with a fact at each of several distances from the end, among
other facts or (needle) among letters only. Each question starts from the same state. Methods that
compress a finished prompt do so before the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import Derived, Results, Statement, above, below, claim, within

VALUES = 8  # that a fact may have
CONTEXT = 512  # of the trained models
SLOTS = 128
COMPRESSED = ("balance", "uniform", "uniform, unweighted", "snapkv", "pyramidkv")
LONGEST = 2000  # tokens back, in streams longer than the trained context
NEARER = (16, 48)  # tokens back: in every window
BETWEEN = (64, 96)  # in streaming's window, and not in the shorter windows beside a sample
EVICTED = (SLOTS + 1, CONTEXT)  # beyond every window
LONGER = (SLOTS + 1, LONGEST)  # the same, in streams longer than the trained context
ALL_DISTANCES = (0, CONTEXT)
MIN_DIFFERENCE = 0.05  # share of all answers; a smaller difference counts as none


def right_answers(
    results: Results, policy: str, distances: tuple[int, int], part: str = "within"
) -> list[float]:
    """By trained model, the share of right answers about facts so many tokens back."""
    near, farthest = distances
    return [
        mean(
            share
            for distance, share in model[part][policy]["right"].items()
            if near <= int(distance) <= farthest
        )
        for model in results["seeds"].values()
    ]


def shares(policies: Sequence[str], distances: tuple[int, int], part: str = "within") -> Derived:
    """The right answers of each policy."""
    return lambda results: {
        policy: right_answers(results, policy, distances, part) for policy in policies
    }


def gains(pairs: Sequence[tuple[str, str]], distances: tuple[int, int]) -> Derived:
    """The right answers of the first policy of each pair minus those of the second."""

    def measure(results: Results) -> dict[str, list[float]]:
        return {
            f"{policy} over {baseline}": [
                x - y
                for x, y in zip(
                    right_answers(results, policy, distances),
                    right_answers(results, baseline, distances),
                    strict=True,
                )
            ]
            for policy, baseline in pairs
        }

    return measure


def evicted_needles(results: Results) -> dict[str, float]:
    """Of a record of tasks: right answers about evicted parts, reservoir's minus streaming's."""
    cases = {}
    for task, lengths in results["tasks"].items():
        for length, measured in lengths.items():
            for ratio, rows in measured["ratios"].items():
                if not measured["scored"] or not {"streaming", "reservoir"} <= set(rows):
                    continue
                evicted = int(len(measured["full"]["by_depth"]) * (1 - float(ratio)))
                sample, window = (
                    mean(rows[name]["by_depth"][:evicted]) for name in ("reservoir", "streaming")
                )
                cases[f"{task}, {length} tokens, {ratio}"] = sample - window
    return cases


SAMPLES = ("reservoir", "stratified", "balance-stream")
SIZES = ("reservoir, sample 16", "reservoir", "reservoir, sample 256")
NO_FIGURE = "sections 6 and 7, no figure"
RESERVOIR = (
    claim(NO_FIGURE,
          "About evicted parts of a context, a sample answers over 5 percentage points more "
          "needles and pass keys than streaming",
          "tasks", above(evicted_needles, MIN_DIFFERENCE), unit="points"),
    claim(NO_FIGURE,
          "In small models, a sample answers over 5 percentage points more questions about evicted "
          "facts than streaming, by the equations and by the pseudocode (geometric)",
          "recall",
          above(gains([(name, "streaming") for name in ("reservoir", "reservoir, geometric")],
                      EVICTED), MIN_DIFFERENCE), unit="points"),
    claim("section 6, no figure",
          "A sample of 64 tokens answers over 5 percentage points more questions about evicted "
          "facts than one of 16, and one of 256 as many more than that",
          "recall",
          above(gains([(large, small) for small, large in pairwise(SIZES)], EVICTED),
                MIN_DIFFERENCE),
          unit="points"),
)  # fmt: skip
BALANCEKV = (
    claim("not claimed",
          "In small models BalanceKV answers over 5 percentage points more questions than uniform "
          "sampling, SnapKV, PyramidKV and StreamingLLM",
          "recall",
          above(gains([("balance", name) for name in
                       ("uniform", "snapkv", "pyramidkv", "streaming")], ALL_DISTANCES),
                MIN_DIFFERENCE),
          unit="points"),
)  # fmt: skip


def by_policy(policies: Sequence[str], columns: dict[str, tuple[str, tuple[int, int]]]) -> str:
    """Right answers by policy, for each column's part of the record and distances."""
    results = read("recall")["results"]
    return table(["cache", *columns], (
        (f"`{policy}`", *(
            f"{mean(right_answers(results, policy, distances, part)):.0%}"
            if policy in results["seeds"]["0"][part] else ""
            for part, distances in columns.values()
        )) for policy in policies
    ))  # fmt: skip


def streamed_table() -> str:
    """Recall of caches that evict while they read."""
    return by_policy([*read("recall")["results"]["policies"]], {
        "16 to 48 tokens back": ("within", NEARER),
        "64 and 96": ("within", BETWEEN),
        "129 to 384": ("within", EVICTED),
        "129 to 384, only fact": ("needle", EVICTED),
        "129 to 2,000, in longer streams": ("beyond", LONGER),
    })  # fmt: skip


def compressed_table() -> str:
    """Recall after a prompt was compressed."""
    return by_policy(["full", "streaming", *COMPRESSED], {
        "32 to 96 tokens back": ("within", (32, 96)),
        "129 to 384": ("within", EVICTED),
        "129 to 384, only fact": ("needle", EVICTED),
    })  # fmt: skip


TABLES = {"recall": streamed_table, "recall_compressed": compressed_table}
PAGE, BALANCEKV_PAGE = "docs/results/reservoir.md", "docs/results/balancekv.md"
WHICH_PAGE = "docs/which_cache.md"
STATEMENTS = (
    Statement(PAGE, "A sample recalls more of the facts that every window has evicted", "recall",
              [above(gains([(name, "streaming") for name in SAMPLES], EVICTED), MIN_DIFFERENCE)]),
    Statement(PAGE, "A sample of 64 tokens that represents the whole past loses most facts that "
              "only the longer window of `streaming` still holds", "recall",
              [below(shares(SAMPLES, BETWEEN), 0.5)]),
    Statement(PAGE, "it recalls less than a fifth", "recall",
              [below(shares(SAMPLES, LONGER, "beyond"), 0.2)]),
    Statement(PAGE, "a sample recalls no evicted needle that `streaming` does not recall", "tasks",
              [below(evicted_needles, 1e-9)]),
    Statement(BALANCEKV_PAGE, "`balance` recalls about as much as a uniform sample", "recall",
              [within(gains([("balance", "uniform")], ALL_DISTANCES), by=MIN_DIFFERENCE)]),
    Statement(BALANCEKV_PAGE, "`pyramidkv` recalls most", "recall",
              [above(gains([("pyramidkv", name) for name in COMPRESSED if name != "pyramidkv"],
                           ALL_DISTANCES))]),
    Statement(WHICH_PAGE, "recall distant facts more often with a sample", "recall",
              [above(gains([(name, "streaming") for name in SAMPLES], EVICTED), MIN_DIFFERENCE)]),
    Statement(WHICH_PAGE, "`balance`, `uniform`, `snapkv` and `pyramidkv` answer more questions "
              "about distant facts than `streaming`, and fewer about near ones", "recall",
              [above(gains([(name, "streaming") for name in COMPRESSED], EVICTED), MIN_DIFFERENCE),
               below(gains([(name, "streaming") for name in COMPRESSED], (32, 96)))]),
)  # fmt: skip
