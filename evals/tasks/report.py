"""The table of the task record, and a cell of it, for docs/results and CLAIMS.md."""

from __future__ import annotations

from collections.abc import Iterator

from jaxkv.evals.lib.claim import Results
from jaxkv.evals.lib.record import RESULTS, read
from jaxkv.state.memory import show


def cases(results: Results) -> Iterator[tuple[str, str, Results]]:
    """Task, length and results of every case, in the order of the record."""
    for task, by_length in results["tasks"].items():
        for length, found in by_length.items():
            yield task, length, found


def score(found: Results) -> str:
    """A score with its interval, in percent; found: of full attention or of a policy."""
    low, high = (f"{100 * found[end]:.0f}" for end in ("low", "high"))
    return f"{found['score']:.0%} ({low} to {high})"


def gate(found: Results) -> str:
    """Whether a case is scored; found: its results. Right: with all parts of the answer."""
    full = found["full"]
    right = f"full attention is right in {full['right']} of {full['samples']}"
    return f"scored: {right}" if found["scored"] else f"not scored: {right}"


def gates() -> str:
    """One row per task and length: what full attention solves."""
    return gate_rows(read("task_gates", RESULTS)["results"])


def gate_rows(results: Results) -> str:
    lines = ["| task, tokens | right answers of full attention | gate |", "|---|---|---|"]
    lines += [
        f"| {task}, {int(length):,} | {score(found['full'])} | {gate(found)} |"
        for task, length, found in cases(results)
    ]
    return "\n".join(lines) + "\n"


def divergence(found: Results) -> str:
    """KL per answer token with two standard errors, and top-1 agreement."""
    error = found["kl_two_errors"]
    spread = "" if error is None else f" ± {error:.2f}"
    return f"{found['kl']:.2f}{spread} | {found['agreement']:.0%}"


def table(record: str) -> str:
    """One row per case, budget and policy."""
    results = read(record, RESULTS)["results"]
    lines = [
        "| task, tokens | budget | policy | right answers | KL per token (nats) | same top token "
        "| state |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, length, found in cases(results):
        case = f"{task}, {int(length):,}"
        lines.append(f"| {case} | all | `full` | {score(found['full'])} | 0 | 100% "
                     f"| {show(found['full']['state_bytes'])} |")  # fmt: skip
        for ratio, rows in found["ratios"].items():
            for name, row in rows.items():
                right = score(row) if found["scored"] else gate(found)
                lines.append(
                    f"| {case} | {100 * float(ratio):g}% | `{name}` | {right} | {divergence(row)} "
                    f"| {show(row['state_bytes'])} |"
                )
    return "\n".join(lines) + "\n"
