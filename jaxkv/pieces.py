"""A long chunk taken a few tokens at a time, for policies whose memory grows with its square."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxkv.contract import Chunk, Partial, State

Take = Callable[[State, Chunk], tuple[Partial | None, State]]


def in_pieces(take: Take, state: State, chunk: Chunk, size: int) -> tuple[Partial | None, State]:
    """What `take` says of the whole chunk, given at most `size` tokens of it at a time."""
    tokens = chunk.valid.shape[1]
    if tokens <= size:
        return take(state, chunk)
    more = -tokens % size
    rows = chunk.valid.shape[0]

    def split(leaf: jax.Array) -> jax.Array:
        padded = jnp.pad(leaf, [(0, 0), (0, more)] + [(0, 0)] * (leaf.ndim - 2))
        return jnp.moveaxis(padded.reshape(rows, -1, size, *leaf.shape[2:]), 1, 0)

    def join(leaf: jax.Array) -> jax.Array:
        whole = jnp.moveaxis(leaf, 0, 1)
        return whole.reshape(rows, -1, *whole.shape[3:])[:, :tokens]

    def one(state: State, piece: Chunk) -> tuple[State, Partial | None]:
        partial, state = take(state, piece)
        return state, partial

    state, partial = jax.lax.scan(one, state, jax.tree.map(split, chunk))
    return jax.tree.map(join, partial), state
