"""Every token, in slots that grow: what `full` is, and a prompt until it is thinned.

More tokens than slots raise UserError; in a compiled call, where nothing can be raised, the row
answers NaN from then on, so that lost tokens cannot go unseen.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import slots
from jaxkv.contract import Chunk, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.slots import OVERFULL, Slots


def reserve(state: Slots, tokens: int, most: int) -> Slots:
    """Room for `tokens` in all, by doubling. Raises UserError for more than `most`."""
    size = state.positions.shape[1]
    if tokens <= size:
        return state
    if tokens > most:
        raise UserError(
            f"a cache that grows holds at most {most} tokens and {tokens} are needed; raise "
            "max where the policy has one, or use a policy with a fixed memory such as "
            "streaming:sinks=4,window=252"
        )
    while size < tokens:
        size = min(2 * size, most)
    return slots.grow(state, size)


def attend(spec: Spec, state: Slots, chunk: Chunk) -> Partial:
    partial = slots.attend(spec, state, chunk, sinks=0, window=None)
    new = jnp.sum(chunk.valid, axis=1, dtype=jnp.int32)
    return _refuse(partial, state.count > state.positions.shape[1] - new)


def extend(spec: Spec, state: Slots, chunk: Chunk) -> Slots:
    _check_room(state, chunk)
    return slots.extend(spec, state, chunk, sinks=0, ring=False)


def decode(spec: Spec, state: Slots, chunk: Chunk) -> tuple[Partial, Slots]:
    _check_room(state, chunk)
    partial, state = slots.decode(spec, state, chunk, sinks=0, ring=False)
    return refuse(partial, state), state


def refuse(partial: Partial, after: Slots) -> Partial:
    """NaN for rows that were given more tokens than there are slots."""
    return _refuse(partial, after.count > after.positions.shape[1])


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
            f"there are {size} slots a row and {most} are needed; make room first: "
            f"state = policy.reserve(spec, state, {most})"
        )


def _refuse(partial: Partial, over: jax.Array) -> Partial:
    return partial._replace(out=jnp.where(over[:, None, None, None], jnp.nan, partial.out))
