"""Plots of the records of prefix caching, for evals.lib.figures."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.models.palette import COLOURS, LINES

MODES = {"rekey": COLOURS["window"], "alias": COLOURS["streaming"], "full": COLOURS["full"]}
RULES = (
    "streaming",
    "recompute",
    "reservoir",
    "stratified",
)  # policies whose colours the rules get


def report(axes: Any, results: dict[str, Any]) -> None:
    """Hit rate by the share of frequent prompts, for several modes, blocks and slots; minimum to
    maximum of seeds (the report's Figure 1)."""
    curves = results["report"]["curves"]
    drawn = [name.split(", ")[0] for name in curves]
    for number, (name, curve) in enumerate(curves.items()):
        mode = drawn[number]
        at = [100 * float(p) for p in curve]
        found = {end: np.array([point[end] for point in curve.values()])
                 for end in ("mean", "min", "max")}  # fmt: skip
        line = LINES[drawn[:number].count(mode)]
        axes.plot(at, found["mean"], color=MODES[mode], linestyle=line, label=name)
        axes.fill_between(at, found["min"], found["max"], color=MODES[mode], alpha=0.15, lw=0)
    axes.set(xlabel="prompts drawn from ten frequent ones (%)", ylabel="blocks found (%)",
             ylim=(0, 100))  # fmt: skip


def snapshots(axes: Any, results: dict[str, Any]) -> None:
    """Cached tokens of Mooncake's conversations, by slots and by rule for storing states."""
    for colour, (where, row) in zip(RULES, results["snapshots"].items(), strict=True):
        shares = [100 * point["share"] for point in row.values()]
        axes.plot(range(len(row)), shares, "o-", markersize=3, color=COLOURS[colour], label=where)
    axes.set_xticks(range(len(row)), row)
    axes.set(xlabel="slots", ylabel="tokens found (%)", ylim=(0, None))


def items(axes: Any, results: dict[str, Any]) -> None:
    """Answers per second of the engine, minimum to maximum of the rounds (the report's Figure
    2)."""
    shares = results["report"]["shares"]
    at = [100 * float(p) for p in shares]
    for name, label, colour in (("none", "no prefix caching", COLOURS["full"]),
                                ("kept", "prefix caching", COLOURS["streaming"])):  # fmt: skip
        found = {end: np.array([one["items_per_second"][name][end] for one in shares.values()])
                 for end in ("median", "min", "max")}  # fmt: skip
        axes.plot(at, found["median"], "o-", markersize=3, color=colour, label=label)
        axes.fill_between(at, found["min"], found["max"], color=colour, alpha=0.15, lw=0)
    axes.set(xlabel="prompts drawn from ten frequent ones (%)", ylabel="answers a second",
             ylim=(0, None))  # fmt: skip


def agents(axes: Any, results: dict[str, Any]) -> None:
    """Cached tokens of agents' turns by memory: evicting caches by number of stored states, a full
    cache with all its pages."""
    widths = iter((4.0, 2.5, 1.2))  # wide lines stay visible below narrow ones
    for name, found in results["policies"].items():
        policy = name.split(":")[0]
        memory = [point["bytes"] / 2**20 for point in found["slots"].values()]
        shares = [100 * point["saved"] / results["tokens"] for point in found["slots"].values()]
        axes.plot(memory, shares, "o-", lw=next(widths), markersize=3, color=COLOURS[policy],
                  label=policy)  # fmt: skip
    full = results["full"]
    axes.plot(full["bytes"] / 2**20, 100 * full["share"], "s", color=COLOURS["full"], label="full")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="memory of what is kept (MiB)", ylabel="tokens not read again (%)",
             ylim=(0, 100))  # fmt: skip
