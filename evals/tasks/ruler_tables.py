"""Tables of RULER's own tasks: what full attention solves, and policies as on kvpress's board."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import mean

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import UNMEASURED, table
from jaxkv.evals.lib.verdict import Results
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


def solved(record: str, length: str) -> Iterator[tuple[str, Results]]:
    """The tasks that full attention solves at a length."""
    for task, by_length in tasks_of(record).items():
        if by_length.get(length, {}).get("scored"):
            yield task, by_length[length]


def board(record: str) -> str:
    """A row per policy: mean score and mean KL over the solved tasks, by length and share."""
    columns = {
        f"{int(length):,}: {evicted}": [case["ratios"].get(share, {}) for _, case in cases]
        for length in LENGTHS
        if (cases := list(solved(record, length)))
        for share, evicted in SHARES.items()
    }
    return policies(columns, (
        "Score in percent / KL to full attention in nats per token of its answer, means over the "
        "tasks that full attention solves. Columns: length, and the share that is evicted."
    ))  # fmt: skip


def by_task(record: str) -> str:
    """A row per policy: the score in each solved task, with a quarter of the context cached."""
    columns = {
        f"{task}, {int(length):,}": [case["ratios"].get(QUARTER, {})]
        for length in LENGTHS
        for task, case in solved(record, length)
    }
    return policies(
        columns, f"Score in percent / KL in nats with {SHARES[QUARTER]} of the context evicted."
    )


def policies(columns: dict[str, list[Results]], caption: str) -> str:
    """A row per measured policy. columns: by head, the rows of all policies in each task."""
    cells = {
        policy: [score_and_kl([row.get(policy) for row in rows]) for rows in columns.values()]
        for policy in NAMES
    }
    rows = [(f"`{policy}`", *row) for policy, row in cells.items() if {*row} != {UNMEASURED}]
    return table(("policy", *columns), rows, caption)


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
