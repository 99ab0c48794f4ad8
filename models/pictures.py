"""How all pictures here look: axes, caption, bytes. What a colour stands for is in palette.py."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#404040"  # of captions and marks
RULE = "#e6e6e6"  # of the lines behind a plot


def begin(width: float = 6.0, height: float = 3.6, columns: int = 1) -> tuple[Figure, Any]:
    """A figure and its axes, side by side; without a window, whatever the backend.

    width and height in inches: so narrow that letters can be read on a telephone.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    made = figure.subplots(1, columns, squeeze=False)[0]
    for axes in made:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=RULE, lw=0.6)
        axes.set_axisbelow(True)
    return figure, made[0] if columns == 1 else made


def mark(axes: Any, position: float, says: str) -> None:
    """A dashed line across a plot, and what happens there."""
    axes.axvline(position, color=INK, lw=0.8, ls=(0, (4, 4)), zorder=0)
    axes.annotate(says, (position, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
                  textcoords="offset points", va="top", fontsize=8, color=INK)  # fmt: skip


def legend(figure: Figure, columns: int) -> None:
    """Names of lines above the plots."""
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=columns)


def finish(figure: Figure, caption: str, dpi: int = 90) -> bytes:
    """The figure with its caption below, as a PNG without software version or date: the same
    record gives the same bytes."""
    figure.supxlabel(caption, fontsize=8, color=INK, wrap=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi, format="png", metadata={"Software": None})
    figure.clear()
    return buffer.getvalue()
