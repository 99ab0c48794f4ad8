"""Plots of sinks in training and in front of published models."""

from __future__ import annotations

from typing import Any

from jaxkv.models.tools.palette import COLOURS, VARIANTS

SIZE = 256  # of a cache
KINDS = {  # variants of training, as tables name them
    "none": "plain softmax",
    "zero": "zero sink",
    "logit": "sink logits",
    "token": "sink token",
    "two_tokens": "two sink tokens",
}
SHOWN = {  # variants of evals.training.sinks_in_front: label, colour, line
    "plain": ("as published", COLOURS["full"], "solid"),
    "constant": ("constant token", VARIANTS["none"], "dotted"),
    "zero": ("zero sink, untrained", VARIANTS["zero"], "dotted"),
    "frozen_logit-0": ("sink logits, weights frozen", VARIANTS["logit"], "dashed"),
    "frozen_token-0": ("sink token, weights frozen", VARIANTS["token"], "dashed"),
    "all_none-0": ("all weights, no sink", VARIANTS["none"], "solid"),
    "all_logit-0": ("all weights, sink logits", VARIANTS["logit"], "solid"),
    "all_token-0": ("all weights, sink token", VARIANTS["token"], "solid"),
}


def sinks_in_front(axes: Any, results: dict[str, Any]) -> None:
    """Loss of SmolLM2-135M in a cache of 256 tokens, minus that of the published model with four
    sinks, by the number of first tokens that stay in the cache."""
    for name, (label, colour, line) in SHOWN.items():
        sizes = [s for s in results["variants"][name] if sum(map(int, s.split("+"))) == SIZE]
        gaps = [results["variants"][name][size]["loss_over_base"] for size in sizes]
        axes.plot(range(len(sizes)), gaps, color=colour, linestyle=line, marker="o", label=label)
    axes.set_xticks(range(len(sizes)), [size.split("+")[0] for size in sizes])
    axes.set(xlabel="first tokens in the cache", ylabel="loss over 4 sinks (nats)")


def emergence(axes: Any, results: dict[str, Any]) -> None:
    """The largest attention on the first token of any head, during training from random weights.
    In SmolLM2-135M, half of the heads give it more than 0.3."""
    for name, run in results["runs"].items():
        size, sinks = name.split()
        style = {"color": VARIANTS[sinks], "linestyle": "solid" if size == "small" else "dotted"}
        axes.plot(run["million_tokens"], run["first_token_most"], label=name, **style)
    axes.axhline(0.3, color=COLOURS["full"], linewidth=0.8)
    axes.set(xscale="log", xlabel="million tokens of training", ylabel="most attention of a head")
