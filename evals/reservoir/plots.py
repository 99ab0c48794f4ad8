"""Plots of the records of reservoir sampling, for evals.lib.figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxkv.models.tools.palette import COLOURS, styles

VALUES = 8  # of a fact


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


def recall(axes: Any, results: dict[str, Any]) -> None:
    """A model reads facts among random letters and is then asked for one, whose value is one of
    eight. Mean over trained models, from the lowest to the highest. Dotted: tokens in a cache.
    Dashed: a guess."""
    draw_recall(axes, results, [name for name in results["policies"] if ", " not in name])
    axes.axvline(results["slots"], color=COLOURS["full"], linewidth=0.8, linestyle="dotted")


def recall_compressed(axes: Any, results: dict[str, Any]) -> None:
    """The same task; the prompt is compressed before the question. Mean over trained models, from
    the lowest to the highest. Dashed: a guess."""
    names = [name for name in results["compressed"] if ", " not in name]
    draw_recall(axes, results, ["full", "streaming", *names])


def draw_recall(axes: Any, results: dict[str, Any], names: list[str]) -> None:
    seeds = [seed["within"] for seed in results["seeds"].values()]
    widths = np.linspace(4, 1.2, len(names))  # wide lines stay visible below narrow ones
    for name, width, style in zip(names, widths, styles(names), strict=True):
        right = 100 * np.array([list(seed[name]["right"].values()) for seed in seeds])
        distances = list(map(int, seeds[0][name]["right"]))
        axes.plot(distances, right.mean(0), label=name, lw=width, **style)
        axes.fill_between(distances, right.min(0), right.max(0), color=style["color"], alpha=0.12,
                          lw=0)  # fmt: skip
    axes.set(xscale="log", xlabel="distance of the fact from the question (tokens)",
             ylabel="right answers (%)", ylim=(0, None))  # fmt: skip
    # The accuracy of a guess: one over the number of values.
    axes.axhline(100 / VALUES, color=COLOURS["full"], linewidth=0.8, linestyle="dashed")
    beside = zip(distances, [*distances[1:], math.inf], strict=True)
    axes.set_xticks(
        distances, [distance if after >= 1.25 * distance else "" for distance, after in beside]
    )
    axes.set_xticks([], minor=True)
