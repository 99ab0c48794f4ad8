"""Right answers, their intervals, the gate, and the divergence from full attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxkv.evals.lib.record import standard_error
from jaxkv.models.generation.score import divergence as of_logits
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Decoder, Weights
from jaxkv.typing import Array, Bool, Float, Float32

# Text and right answers -> the score of the text, 0 to 1.
Match = Callable[[str, Sequence[str]], float]
GATE = 0.9  # score of full attention below which a task says nothing about a policy
DEPTHS = 4  # parts of a context for which right answers are counted


def match(text: str, answers: Sequence[str]) -> float:
    """The share of the answers that the text contains, in any case (RULER's string match)."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def wilson(score: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927); too wide where answers are partly right."""
    z = 1.96
    middle = (score + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(score * (1 - score) / count + z * z / (4 * count * count))
    half /= 1 + z * z / count
    return max(0.0, middle - half), min(1.0, middle + half)


def passes(score: float) -> bool:
    """Whether full attention solves the task, so that policies can be scored."""
    return score >= GATE


@partial(jax.jit, static_argnums=0)
def divergence(
    config: Config, weights: Weights, full: Float[Array, "B T D"], compressed: Float[Array, "B T D"]
) -> tuple[Float32[Array, "B T"], Bool[Array, "B T"]]:
    """KL(full || compressed) of the next token in nats, and whether the likeliest token agrees.

    full, compressed: last hidden states of the same tokens under full attention and a policy.
    """
    decoder = Decoder(config, weights)
    return of_logits(decoder.logits(full), decoder.logits(compressed))


def mean_of(values: np.ndarray) -> tuple[float, float | None]:
    """The mean over samples with two standard errors; None for a single sample."""
    error = standard_error(values)
    return float(values.mean()), None if error is None else 2 * error


def summary(scores: np.ndarray, depths: Sequence[float] = ()) -> dict[str, Any]:
    """A score with its interval; with the depths of the samples also by quarter of the context."""
    low, high = wilson(float(scores.mean()), len(scores))
    entry: dict[str, Any] = {"score": scores.mean(), "low": low, "high": high}
    part = (np.array(depths) * DEPTHS).astype(int)
    if set(part) == set(range(DEPTHS)):
        entry["by_depth"] = [scores[part == i].mean() for i in range(DEPTHS)]
    return entry
