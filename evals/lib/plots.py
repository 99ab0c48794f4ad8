"""Plots of records: each function fills in axes from results, and its docstring is the caption."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxkv.evals.reservoir.recall import VALUES
from jaxkv.models.tools import pictures
from jaxkv.models.tools.palette import (
    COLOURS,
    LINES,
    OTHERS,
    ROLLOUTS,
    VARIANTS,
    styles,
)


def draw_spreads(axes: Any, at: Any, lines: dict[str, Any], **style: Any) -> None:
    """Medians over the seeds, with minimum and maximum."""
    mid = np.array([line["median"] for line in lines.values()])
    ends = [[line[end] for line in lines.values()] for end in ("min", "max")]
    axes.errorbar(at, mid, np.abs(ends - mid), capsize=2, **style)


def backcopy(axes: Any, results: dict[str, Any]) -> None:
    """Loss over a cache with the first four tokens; median, minimum and maximum of seeds. Only
    models with a trained sink lose when it is evicted. In the band the loss is the same to
    rounding (StreamingLLM, Table 3, at small scale)."""
    rounding = 1e-4  # nats; rounding gives 1e-5
    for number, (variant, variant_results) in enumerate(results["variants"].items()):
        over = variant_results["summary"]["loss_over_base"]
        at = np.arange(len(over)) + 0.15 * (number - (len(results["variants"]) - 1) / 2)
        draw_spreads(axes, at, over, fmt="o", markersize=5, color=VARIANTS[variant], label=variant)
    axes.axhspan(-rounding, rounding, color=COLOURS["full"], alpha=0.2, lw=0)
    for boundary in range(1, len(over)):
        axes.axvline(boundary - 0.5, color=COLOURS["full"], lw=0.4)
    axes.set_yscale("symlog", linthresh=rounding, linscale=0.5)
    axes.set_yticks([0, 1e-3, 1e-2, 1e-1, 1], ["0", "0.001", "0.01", "0.1", "1"])
    axes.set_xticks(range(len(over)), over)
    axes.set(xlabel="first + newest tokens in the cache", ylabel="loss over 4+20 (nats per token)",
             xlim=(-0.5, len(over) - 0.5), ylim=(-2 * rounding, 4))  # fmt: skip


def backcopy_curves(axes: Any, results: dict[str, Any]) -> None:
    """Attention on the first token during training of each model."""
    runs = [
        (variant, trained["seeds"][0], VARIANTS[variant], "solid")
        for variant, trained in results["variants"].items()
    ]
    tries = zip(results["tries"].items(), OTHERS, strict=True)
    runs += [(f"none, {name}", trial, colour, "dashed") for (name, trial), colour in tries]
    for label, trained, colour, line in runs:
        steps, _, attention = zip(*trained["curve"], strict=True)
        axes.plot(steps, attention, color=colour, linestyle=line, label=label)
    axes.set(xlabel="steps of training", ylabel="share of attention on first token", ylim=(0, None))


def rollouts(panels: Any, results: dict[str, Any]) -> None:
    """Median of the seeds with their range. Left: reward of each step. Right: the same minus the
    reward of full with the same seed, mean of ten steps. full: full attention in sampler and
    learner. Others: a cache of ten tokens in the sampler. mismatch: full attention in the learner.
    weights: so, with weighted tokens. bounded: the attention of the sampler in the learner."""
    reward_panel, difference_panel = panels
    rewards = {
        name: 100 * np.array([seed["rewards"] for seed in variant["seeds"]])
        for name, variant in results["arms"].items()
    }
    steps = np.arange(1, rewards["full"].shape[1] + 1)
    for name, by_seed in rewards.items():
        draw_seeds(reward_panel, steps, by_seed, color=ROLLOUTS[name], label=name)
        behind = [np.convolve(x, np.full(10, 0.1), "valid") for x in by_seed - rewards["full"]]
        draw_seeds(difference_panel, steps[9:], np.array(behind), color=ROLLOUTS[name])
    reward_panel.set(xlabel="step of GRPO", ylabel="reward: right letters (%)", ylim=(0, 100))
    difference_panel.set(xlabel="step of GRPO", ylabel="reward minus full (points)")


def draw_seeds(axes: Any, at: Any, by_seed: np.ndarray, **style: Any) -> None:
    """The median line over the seeds, in a band from minimum to maximum."""
    axes.plot(at, np.median(by_seed, axis=0), **style)
    axes.fill_between(at, by_seed.min(0), by_seed.max(0), color=style["color"], alpha=0.12, lw=0)


def streaming_tables(axes: Any, results: dict[str, Any]) -> None:
    """Loss by position, mean over novels. Re-computation predicts few tokens: its line is that of 4
    sinks + 252 plus the mean difference at these tokens."""
    at = results["curve"]["tokens"]
    for name, (label, style) in SINK_LINES.items():
        axes.plot(at, results["curve"][name], label=label, **{"lw": 1.2} | style)
    pictures.mark(axes, results["context"], "trained context")
    axes.set(xlabel="position (tokens)", ylabel="loss (nats per token)", xlim=(0, at[-1]))


SINK_LINES = {
    "full": ("full attention", {"color": COLOURS["full"]}),
    "0+256": ("window of 256, no sink", {"color": COLOURS["window"]}),
    "4+252": ("4 sinks + 252", {"color": COLOURS["streaming"], "lw": 4, "alpha": 0.5}),
    "re-computation": ("re-computation of 256", {"color": COLOURS["recompute"]}),
}


def recall(axes: Any, results: dict[str, Any]) -> None:
    """A model reads facts among random letters and is then asked for one, whose value is one of
    eight. Mean over trained models, from the lowest to the highest. Dotted: tokens in a cache.
    Dashed: a guess."""
    draw_recall(axes, results, [name for name in results["policies"] if ", " not in name])
    axes.axvline(results["slots"], color=COLOURS["full"], linewidth=0.8, linestyle="dotted")


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


MODES = {"rekey": COLOURS["window"], "alias": COLOURS["streaming"], "full": COLOURS["full"]}
RULES = (
    "streaming",
    "recompute",
    "reservoir",
    "stratified",
)  # policies whose colours the rules get


def prefix_report(axes: Any, results: dict[str, Any]) -> None:
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


def prefix_snapshots(axes: Any, results: dict[str, Any]) -> None:
    """Cached tokens of Mooncake's conversations, by the number of stored states and by the rule for
    storing them."""
    for colour, (where, row) in zip(RULES, results["snapshots"].items(), strict=True):
        shares = [100 * point["share"] for point in row.values()]
        axes.plot(range(len(row)), shares, "o-", markersize=3, color=COLOURS[colour], label=where)
    axes.set_xticks(range(len(row)), row)
    axes.set(
        xlabel="stored states (inf: all)", ylabel="prompt tokens not computed (%)", ylim=(0, None)
    )


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
