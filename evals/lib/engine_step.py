"""A decode step of the engine as one program, to look at what XLA makes of it."""

from __future__ import annotations

from typing import Any

from jaxkv.contract import State
from jaxkv.serve.engine.model import Model, StepOutput
from jaxkv.serve.engine.programs import DecodeBatch, feed, sample
from jaxkv.typing import Array


def engine_step(
    model: Model,
    like: tuple[State, ...],
    weights: Any,
    batch: DecodeBatch,
    active: Array,
    scored: Array,
) -> tuple[DecodeBatch, StepOutput]:
    """`feed`, then `sample`; the engine calls them as two programs. like: as in `feed`."""
    states, logits = feed(model, like, weights, batch.states, batch.token, batch.position, active)
    batch, output = sample(batch._replace(states=()), logits, active, scored)
    return batch._replace(states=states), output
