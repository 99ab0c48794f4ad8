"""The training curves of a run, as a picture (StreamingLLM, Figure 6)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxkv.models.tools.palette import COLOURS

BLUE, ORANGE, GREY = COLOURS["streaming"], COLOURS["window"], COLOURS["full"]
SMOOTH = 0.9  # weight of earlier steps in the smoothed loss


def draw(lines: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """A PNG of loss, learning rate, gradient norm, speed and sinks over the steps."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    (loss, rate), (norm, sinks) = figure.subplots(2, 2)
    steps = [line["step"] for line in lines]
    values = [line["loss"] for line in lines]
    loss.plot(steps, values, color=GREY, alpha=0.4, linewidth=0.8, label="a step")
    loss.plot(steps, smoothed(values), color=BLUE, label="smoothed")
    evaluated = [line for line in lines if "valid_loss" in line]
    seen = [line["step"] for line in evaluated]
    loss.plot(seen, [line["valid_loss"] for line in evaluated], ".-", color=ORANGE, label="valid")
    loss.set_ylabel("loss (nats a token)")
    loss.legend()
    rate.plot(steps, [line["lr"] for line in lines], color=BLUE)
    rate.set_ylabel("learning rate")
    norm.plot(steps, [line["grad_norm"] for line in lines], color=BLUE, linewidth=0.8)
    norm.set_ylabel("gradient norm, before clipping")
    norm.set_yscale("log")
    sinks.plot(seen, [line["first_token"] for line in evaluated], ".-", color=BLUE, label="mean")
    first_token_max = [line["first_token_most"] for line in evaluated]
    sinks.plot(seen, first_token_max, ".-", color=ORANGE, label="the head with the most")
    sinks.set_ylabel("attention on the first token")
    sinks.set_ylim(0, 1)
    sinks.legend()
    for axes in (loss, rate, norm, sinks):
        axes.set_xlabel("step")
        axes.grid(alpha=0.2)
    figure.suptitle(title)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def smoothed(values: Sequence[float]) -> np.ndarray:
    """A running mean that starts unbiased."""
    total, weight, means = 0.0, 0.0, []
    for value in values:
        total = SMOOTH * total + (1 - SMOOTH) * value
        weight = SMOOTH * weight + (1 - SMOOTH)
        means.append(total / weight)
    return np.array(means)
