"""Full attention: every token is kept, up to a stated maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import slots
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.slots import OVERFULL, Slots


@dataclass(frozen=True)
class Full:
    """Keep everything: `start` slots, doubled by `reserve` as they fill, never beyond `max`.

    Whoever drives `step` calls `reserve` between calls, for inside one the slots cannot grow. More
    tokens than slots raise UserError; in a compiled call, where nothing can be raised, the row
    answers NaN from then on, so that lost tokens cannot go unseen.
    """

    max: int = 131072
    start: int = 512

    summary: ClassVar[str] = "every token, up to a maximum"
    source: ClassVar[str] = "dense attention"
    formula: ClassVar[str] = "min(start, max) * (2 * K * H * itemsize + 4) + 4, doubling to max"
    axes: ClassVar[Slots] = slots.AXES
    shared: ClassVar[tuple[str, ...]] = slots.SHARED

    def __post_init__(self) -> None:
        if self.max < 1 or self.start < 1:
            raise UserError(f"max and start must be at least 1, got {self.max} and {self.start}")

    @property
    def reach(self) -> int:
        return self.max

    def init(self, spec: Spec, rows: int, key: jax.Array) -> Slots:
        return slots.init(spec, rows, min(self.start, self.max))

    def reserve(self, spec: Spec, state: Slots, tokens: int) -> Slots:
        """Room for `tokens` in all; raises UserError beyond `max`. Shapes change: not for loops."""
        size = state.positions.shape[1]
        if tokens <= size:
            return state
        if tokens > self.max:
            raise UserError(
                f"full keeps at most max={self.max} tokens and {tokens} are needed; raise max, or "
                "use a policy with a fixed memory such as streaming:sinks=4,window=252"
            )
        while size < tokens:
            size = min(2 * size, self.max)
        return slots.grow(state, size)

    def attend(self, spec: Spec, state: Slots, chunk: Chunk) -> Partial:
        partial = slots.attend(state, spec, chunk, sinks=0, window=None)
        new = jnp.sum(chunk.valid, axis=1, dtype=jnp.int32)
        return _refuse(partial, state.count > state.positions.shape[1] - new)

    def extend(self, spec: Spec, state: Slots, chunk: Chunk) -> Slots:
        _check_room(state, chunk)
        return slots.extend(state, spec, chunk, sinks=0, ring=False)

    def decode(self, spec: Spec, state: Slots, chunk: Chunk) -> tuple[Partial, Slots]:
        _check_room(state, chunk)
        partial, state = slots.decode(state, spec, chunk, sinks=0, ring=False)
        return _refuse(partial, state.count > state.positions.shape[1]), state

    def kept(self, spec: Spec, state: Slots) -> Kept:
        return slots.kept(state)


def _check_room(state: Slots, chunk: Chunk) -> None:
    """Raise UserError for tokens that do not fit, where nothing is compiled and one can look."""
    if isinstance(state.count, jax.core.Tracer) or isinstance(chunk.valid, jax.core.Tracer):
        return
    # In numpy, for inside a trace jax would stage it, whatever the arrays are.
    held, new = np.asarray(state.count, np.int64), np.asarray(chunk.valid).sum(axis=1)
    most, size = int((held + new).max()), state.k.shape[2]
    if most >= OVERFULL:
        raise UserError(
            f"a row was given more tokens than its {size} slots in a compiled call, and they are "
            "lost; begin again with policy.init, and reserve before each call"
        )
    if most > size:
        raise UserError(
            f"full has {size} slots a row and {most} are needed; make room first: "
            f"state = policy.reserve(spec, state, {most})"
        )


def _refuse(partial: Partial, over: jax.Array) -> Partial:
    return partial._replace(out=jnp.where(over[:, None, None, None], jnp.nan, partial.out))
