"""A long chunk, scanned a few tokens at a time.

For policies whose memory is quadratic in the chunk, and for those whose queries change what the
next query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxkv.contract import Chunk, Partial

Carry = TypeVar("Carry")
Update = Callable[[Carry, Chunk], tuple[Partial, Carry]]


def chunked_scan(update: Update, carry: Carry, chunk: Chunk, size: int) -> tuple[Partial, Carry]:
    """`update` of the whole chunk, applied to at most `size` of its tokens at a time."""
    batch, tokens = chunk.valid.shape
    if tokens <= size:
        return update(carry, chunk)
    more = -tokens % size

    def split(leaf: jax.Array) -> jax.Array:
        padded = jnp.pad(leaf, [(0, 0), (0, more)] + [(0, 0)] * (leaf.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, -1, size, *leaf.shape[2:]), 1, 0)

    def join(leaf: jax.Array) -> jax.Array:
        whole = jnp.moveaxis(leaf, 0, 1)
        return whole.reshape(batch, -1, *whole.shape[3:])[:, :tokens]

    def one(carry: Carry, piece: Chunk) -> tuple[Carry, Partial]:
        partial, carry = update(carry, piece)
        return carry, partial

    carry, partial = jax.lax.scan(one, carry, jax.tree.map(split, chunk))
    return jax.tree.map(join, partial), carry
