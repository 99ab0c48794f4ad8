"""The table of the record of workarounds, for docs/decisions/compilation.md."""

from __future__ import annotations

from typing import Any

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import page_table, ranged, table_head
from jaxkv.state.memory import show


def table() -> str:
    """The programs and the rows of the record."""
    return table_of(read("workarounds")["results"])


def table_of(results: dict[str, Any]) -> str:
    """One line per program, and one row per workaround."""
    lines = [f"- {name}: {about}." for name, about in results["programs"].items()]
    heads = ("row", "program", "ms with", "ms without", "times as long without",
             "copies with, without", "memory with, without")  # fmt: skip
    lines += ["", *table_head(*heads)]
    for name, row in results["rows"].items():
        times, copies, memory = (row[key] for key in ("milliseconds", "copies", "temporary_bytes"))
        cells = (
            f"`{name}`", row["program"],
            *(f"{times[form]['median']:.4g}" for form in times),
            ranged(row["ratio"], "median", ".2f"),
            "" if copies["with"] is None else f"{copies['with']}, {copies['without']}",
            ", ".join(map(show, memory.values())),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return page_table(lines)
