"""Tables of RULER's own tasks: what full attention solves, and policies as on kvpress's board."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import mean

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import UNMEASURED, table
from jaxkv.evals.lib.verdict import Derived, Results, Statement, above, below
from jaxkv.evals.tasks.budgets import NAMES, RATIOS

LENGTHS = ("1024", "2048", "4096")
RECORD, QUERY_AWARE = "ruler", "ruler_query_aware"
SHARES = {f"{share:g}": f"{100 * (1 - share):g} %" for share in RATIOS}  # cached: evicted
QUARTER = "0.25"  # cached


def tasks_of(record: str) -> dict[str, dict[str, Results]]:
    """The cases of a record by task and length."""
    return read(record)["results"]["tasks"]


def gates() -> str:
    """A row per task: the score of full attention by length."""
    rows = [
        (task, *(full_score(by_length.get(length)) for length in LENGTHS))
        for task, by_length in tasks_of(RECORD).items()
    ]
    heads = ("task", *(f"{int(length):,} tokens" for length in LENGTHS))
    caption = (
        "Score of full attention; in parentheses, the samples: fewer where the first ones show "
        "that the task is not solved."
    )
    return table(heads, rows, caption)


def full_score(case: Results | None) -> str:
    if case is None:
        return UNMEASURED
    full = case["full"]
    if not full["samples"]:
        return "no prompt as short"
    return f"{full['score']:.0%} ({full['samples']})"


def solved(tasks: Mapping[str, Results], length: str) -> Iterator[tuple[str, Results]]:
    """The tasks that full attention solves at a length. tasks: by task and length."""
    for task, by_length in tasks.items():
        if by_length.get(length, {}).get("scored"):
            yield task, by_length[length]


def board(record: str) -> str:
    """A row per policy: mean score and mean KL over the solved tasks, by length and share."""
    columns, full, tasks = {}, [], tasks_of(record)
    for length in LENGTHS:
        for share, evicted in SHARES.items():
            if cases := [case for _, case in solved(tasks, length)]:
                head = f"{int(length):,}, {len(cases)} tasks: {evicted}"
                columns[head] = [case["ratios"].get(share, {}) for case in cases]
                full.append(f"{100 * mean(case['full']['score'] for case in cases):.0f}")
    return policies(columns, full, (
        "Score in percent / KL to full attention in nats per token of its answer, means over the "
        "tasks that full attention solves at the length, the easiest two alone at 4,096. Columns: "
        "length, tasks, and the share that is evicted."
    ))  # fmt: skip


def by_task(record: str) -> str:
    """A row per policy: the score in each solved task, with a quarter of the context cached."""
    cases = {
        f"{task}, {int(length):,}": case
        for length in LENGTHS
        for task, case in solved(tasks_of(record), length)
    }
    columns = {head: [case["ratios"].get(QUARTER, {})] for head, case in cases.items()}
    full = [f"{100 * case['full']['score']:.0f}" for case in cases.values()]
    return policies(
        columns, full,
        f"Score in percent / KL in nats with {SHARES[QUARTER]} of the context evicted.",
    )  # fmt: skip


def policies(columns: dict[str, list[Results]], full: Sequence[str], caption: str) -> str:
    """A row per measured policy, after that of full attention.

    columns: by head, the rows of all policies in each task.
    """
    cells = {
        policy: [score_and_kl([row.get(policy) for row in rows]) for rows in columns.values()]
        for policy in NAMES
    }
    rows = [(f"`{policy}`", *row) for policy, row in cells.items() if {*row} != {UNMEASURED}]
    return table(("policy", *columns), [("`full`", *full), *rows], caption)


def score_and_kl(rows: list[Results | None]) -> str:
    """The means over tasks; a policy counts only where every task has it."""
    measured = [row for row in rows if row is not None]
    if not measured or len(measured) < len(rows):
        return UNMEASURED
    score, kl = (mean(row[name] for row in measured) for name in ("score", "kl"))
    return f"{100 * score:.0f} / {kl:.2f}"


TABLES = {
    "ruler_gates": gates,
    "ruler_board": partial(board, RECORD),
    "ruler_tasks": partial(by_task, RECORD),
    "ruler_query_aware": partial(board, QUERY_AWARE),
}
PAGE = "docs/results/tasks.md"
SCORE = "tasks/{}/{}/ratios/{}/{}/score"
EVICTED_MOST = "0.125"  # cached


def mean_scores(policies: Sequence[str], share: str, lengths: Sequence[str] = LENGTHS) -> Derived:
    """The mean score of the best of some policies over the solved tasks, by length."""

    def by_length(results: Results) -> dict[str, float]:
        best = {}
        for length in lengths:
            cases = [case for _, case in solved(results["tasks"], length)]
            best[length] = max(
                mean(case["ratios"][share][policy]["score"] for case in cases)
                for policy in policies
            )
        return best

    return by_length


def lead(results: Results) -> dict[str, float]:
    """The mean score of retrieval with a quarter cached, minus the best of the others."""
    ours, baselines = (
        mean_scores(policies, QUARTER)(results)
        for policies in (("retrieval",), ("streaming", "snapkv", "keydiff"))
    )
    return {length: ours[length] - baselines[length] for length in ours}


STATEMENTS = (
    Statement(PAGE, "With three quarters evicted `retrieval` scores most at every length", RECORD,
              [above(lead)]),
    Statement(PAGE, "It answers at most half of `niah_multikey_1`", RECORD,
              [below(SCORE.format("niah_multikey_1", length, QUARTER, "retrieval"), 0.501)
               for length in LENGTHS[:2]]),
    *(Statement(page, says, RECORD,
                [below(mean_scores(("retrieval",), EVICTED_MOST, ("1024",)), 1 / 3)])
      for page, says in (
          (PAGE, "With 87.5 % of 1,024 tokens evicted it keeps under a third"),
          ("evals/NEGATIVE.md", "under a third of the score in RULER's tasks of 1,024 tokens"),
      )),
)  # fmt: skip
