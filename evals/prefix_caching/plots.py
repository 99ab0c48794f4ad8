"""Plots of the records of prefix caching, for evals.lib.figures."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.models.tools.palette import COLOURS, LINES

MODES = {"rekey": COLOURS["window"], "alias": COLOURS["streaming"], "full": COLOURS["full"]}
RULES = (
    "streaming",
    "recompute",
    "reservoir",
    "stratified",
)  # policies whose colours the rules get


def report(axes: Any, results: dict[str, Any]) -> None:
    """Hit rate by the share of frequent prompts, for several modes, blocks and numbers of
    concurrent requests; minimum to maximum of seeds (the report's Figure 1)."""
    curves = results["report"]["curves"]
    drawn = [name.split(", ")[0] for name in curves]
    for number, (name, curve) in enumerate(curves.items()):
        mode = drawn[number]
        at = [100 * float(p) for p in curve]
        rates = {end: np.array([point[end] for point in curve.values()])
                 for end in ("mean", "min", "max")}  # fmt: skip
        line = LINES[drawn[:number].count(mode)]
        axes.plot(at, rates["mean"], color=MODES[mode], linestyle=line, label=name)
        axes.fill_between(at, rates["min"], rates["max"], color=MODES[mode], alpha=0.15, lw=0)
    axes.set(xlabel="prompts drawn from ten frequent ones (%)", ylabel="blocks found (%)",
             ylim=(0, 100))  # fmt: skip


def snapshots(axes: Any, results: dict[str, Any]) -> None:
    """Cached tokens of Mooncake's conversations, by the number of stored states and by the rule for
    storing them."""
    for colour, (where, row) in zip(RULES, results["snapshots"].items(), strict=True):
        shares = [100 * point["share"] for point in row.values()]
        axes.plot(range(len(row)), shares, "o-", markersize=3, color=COLOURS[colour], label=where)
    axes.set_xticks(range(len(row)), row)
    axes.set(
        xlabel="stored states (inf: all)", ylabel="prompt tokens not computed (%)", ylim=(0, None)
    )


def items(axes: Any, results: dict[str, Any]) -> None:
    """Answers per second of the engine, minimum to maximum of the rounds (the report's Figure
    2)."""
    shares = results["report"]["shares"]
    at = [100 * float(p) for p in shares]
    for name, label, colour in (("none", "no prefix caching", COLOURS["full"]),
                                ("cached", "prefix caching", COLOURS["streaming"])):  # fmt: skip
        rates = {end: np.array([share["items_per_second"][name][end] for share in shares.values()])
                 for end in ("median", "min", "max")}  # fmt: skip
        axes.plot(at, rates["median"], "o-", markersize=3, color=colour, label=label)
        axes.fill_between(at, rates["min"], rates["max"], color=colour, alpha=0.15, lw=0)
    axes.set(xlabel="prompts drawn from ten frequent ones (%)", ylabel="answers per second",
             ylim=(0, None))  # fmt: skip
