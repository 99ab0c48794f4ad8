"""Plots of the records of reservoir sampling, for evals.lib.figures."""

from __future__ import annotations

from typing import Any

from jaxkv.models.tools.palette import COLOURS, styles


def stream_losses(axes: Any, results: dict[str, Any]) -> None:
    """Loss minus that of streaming at equal bytes, mean over novels with two standard errors.
    Weighted: a sampled token counts for all n tokens that it represents, or for a power of n.
    Absolute: positions are those of the text."""
    rows = {name: row for name, row in results["rows"].items() if name != "streaming"}
    for at, (row, style) in enumerate(zip(rows.values(), styles(list(rows)), strict=True)):
        axes.errorbar(row["loss_over_base"], -at, xerr=2 * (row["standard_error"] or 0), marker="o",
                      markersize=4, capsize=2, color=style["color"])  # fmt: skip
    axes.axvline(0, color=COLOURS["streaming"], linewidth=0.8)
    axes.set_yticks([-at for at in range(len(rows))], list(rows), fontsize=7)
    axes.set(xlabel="loss over streaming (nats per token)")
