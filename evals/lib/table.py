"""Cells and lines of tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

UNMEASURED = "not measured"  # a cell without a record
BAR = r"\|"  # a bar inside a cell, where a plain one would start another cell


def table_head(*heads: str) -> list[str]:
    """The first two lines of a table."""
    return [table_row(*heads), "|---" * len(heads) + "|"]


def table_row(*cells: object) -> str:
    """A line."""
    return f"| {' | '.join(str(cell).replace('|', BAR) for cell in cells)} |"


def page_table(lines: Sequence[str], caption: str = "") -> str:
    """The text of a table in a page, after its caption."""
    return "\n".join([*([caption, ""] if caption else []), *lines]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """The text of a table in a page, after its caption."""
    return page_table([*table_head(*heads), *(table_row(*cells) for cells in rows)], caption)


def over_base(row: Mapping[str, Any]) -> str:
    """A loss minus the base, with two standard errors where there are several texts."""
    error = row["standard_error"]
    return f"{row['loss_over_base']:+.3f}" + ("" if error is None else f" ± {2 * error:.3f}")


def ranged(data: Mapping[str, float], middle: str, form: str) -> str:
    """The median, or the mean, and the range where it differs as printed."""
    at, low, high = (format(data[name], form) for name in (middle, "min", "max"))
    return at if low == high else f"{at} ({low} to {high})"
