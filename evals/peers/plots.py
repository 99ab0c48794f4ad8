"""The plot of the record `peers`."""

from __future__ import annotations

from typing import Any

from jaxkv.evals.peers.cases import BUDGETS, ENDS
from jaxkv.models.tools.palette import COLOURS


def peers(axes: Any, results: dict[str, Any]) -> None:
    """Loss after a prompt minus full attention's, by the part of the prompt that is removed, with
    two standard errors over texts. Lines: jaxkv. Crosses: kvpress, same weights and prompts;
    it has no balance and no uniform."""
    at = next(iter(results["prompts"].values()))
    for name, rows in at["cases"].items():
        if name == BUDGETS:
            continue
        colour = COLOURS["streaming" if name == ENDS else name]
        removed = [100 * float(ratio) for ratio in rows]
        over = [row["over_full"] for row in rows.values()]
        jaxkv_rows, kvpress_rows = (
            [row[side] for row in over if side in row] for side in ("ours", "theirs")
        )
        errors = [2 * (row["standard_error"] or 0) for row in jaxkv_rows]
        axes.errorbar(
            removed, [row["mean"] for row in jaxkv_rows], errors,
            color=colour, capsize=2, label=name, linestyle="dotted" if name == "streaming" else "-",
        )  # fmt: skip
        if kvpress_rows:
            axes.plot(removed, [row["mean"] for row in kvpress_rows], "x", color=colour)
    axes.axhline(0, color=COLOURS["full"], linewidth=0.8)
    axes.set(xlabel="removed, of the prompt (%)", ylabel="loss over full (nats per token)")
