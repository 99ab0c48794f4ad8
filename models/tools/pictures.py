"""The common style of all pictures: axes, caption, PNG. The colours are in palette.py."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#404040"  # of captions and marks
RULE = "#e6e6e6"  # of grid lines


def begin(
    width: float = 6.0, height: float = 3.6, columns: int = 1, rows: int = 1
) -> tuple[Figure, Any]:
    """A figure of rows x columns axes; never opens a window, whatever the backend.

    width and height in inches; the default is narrow, so that text is legible on a telephone.
    Returns the figure and its axes in reading order, or the axes alone where there is one.
    """
    with _muted_fonts():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=RULE, lw=0.6)
        axes.set_axisbelow(True)
    return figure, all_axes[0] if len(all_axes) == 1 else all_axes


@contextlib.contextmanager
def _muted_fonts() -> Iterator[None]:
    """Without matplotlib's warnings about fonts: it takes another font where it finds none."""
    log = logging.getLogger("matplotlib.font_manager")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def mark(axes: Any, position: float, label: str) -> None:
    """Draw a dashed vertical line with a label."""
    axes.axvline(position, color=INK, lw=0.8, ls=(0, (4, 4)), zorder=0)
    axes.annotate(
        label,
        (position, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color=INK,
    )


def legend(figure: Figure, columns: int) -> None:
    """Draw the legend above the plots."""
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=columns)


def finish(figure: Figure, caption: str, dpi: int = 90, title: str = "") -> bytes:
    """The figure with its title and caption, as a PNG.

    It contains no software version or date: the same record gives the same bytes.
    """
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
    figure.supxlabel(caption, fontsize=8, color=INK, wrap=True)
    buffer = io.BytesIO()
    with _muted_fonts():
        figure.savefig(buffer, dpi=dpi, format="png", metadata={"Software": None})
    figure.clear()
    return buffer.getvalue()
