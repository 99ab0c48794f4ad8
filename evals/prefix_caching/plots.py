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


def agents(panels: Any, results: dict[str, Any]) -> None:
    """Left: prompt tokens of agents' turns that need no prefill, by the number of stored states;
    the evicting policies save the same tokens. Right: memory. A full cache stores all its pages."""
    saved_panel, memory_panel = panels
    saved = {
        name.split(":")[0]: [
            100 * at["saved"] / results["tokens"] for at in policy_results["entries"].values()
        ]
        for name, policy_results in results["policies"].items()
    }
    groups: dict[tuple, list[str]] = {}  # policies that save the same tokens share a line
    for policy, shares in saved.items():
        groups.setdefault(tuple(shares), []).append(policy)
    entries = list(next(iter(results["policies"].values()))["entries"])
    for shares, policies in groups.items():
        saved_panel.plot(
            range(len(entries)), shares, "o-", color=COLOURS[policies[0]], markersize=4
        )
        saved_panel.annotate(
            "\n".join(policies), (len(entries) - 1, shares[-1]), (0, -8),
            fontsize=8, textcoords="offset points", ha="right", va="top",
        )  # fmt: skip
    saved_panel.axhline(100 * results["full"]["share"], color=COLOURS["full"], ls="dashed", lw=1)
    saved_panel.annotate("full", (0, 100 * results["full"]["share"]), (0, 4), fontsize=8,
                         textcoords="offset points")  # fmt: skip
    saved_panel.set_xticks(range(len(entries)), entries)
    saved_panel.set(xlabel="stored states", ylabel="tokens without prefill (%)", ylim=(0, 100))
    largest = 0.99 * max(max(shares) for shares in saved.values())
    # The fewest states that save nearly as much as the most.
    fewest = next(n for i, n in enumerate(entries) if all(s[i] >= largest for s in saved.values()))
    states = {
        name.split(":")[0]: policy_results["entries"][fewest]
        for name, policy_results in results["policies"].items()
    }
    states["full"] = results["full"]
    for row, (policy, state) in enumerate(states.items()):
        size = state["bytes"] / 2**20
        memory_panel.barh(-row, size, color=COLOURS[policy])
        memory_panel.annotate(f"{size:,.0f}", (size, -row), (3, 0), fontsize=8, va="center",
                       textcoords="offset points")  # fmt: skip
    memory_panel.set_yticks([-row for row in range(len(states))], states, fontsize=8)
    memory_panel.grid(visible=False)
    memory_panel.margins(x=0.2)
    memory_panel.set(xlabel=f"memory of {fewest} states (MiB)")
