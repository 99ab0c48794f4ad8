"""The definition of the kernel, in XLA. It reads every entry, so it is for short tables.

Axis letters: B sequences, N query heads, K KV heads, L tables, E blocks of W entries, C codes + 1,
P places.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def count(entries: Array, first: Array, codes: Array, places: int) -> Array:
    """`bucket_counts`."""
    batch, kv_heads, tables, blocks, width = entries.shape
    heads = codes.shape[1]
    place = entries.reshape(batch * kv_heads, tables, -1).astype(jnp.int32) - 1
    first = first.reshape(batch * kv_heads, tables, -1)
    block = jnp.arange(blocks * width)[None] // width

    def count_head(head: Array, codes: Array) -> Array:
        kv_head = head // (heads // kv_heads)
        bounds = first[kv_head]
        begin, end = (jnp.take_along_axis(bounds, codes[:, None] + i, axis=1) for i in (0, 1))
        inside = (block >= begin) & (block < end) & (place[kv_head] >= 0)
        at = jnp.where(inside, place[kv_head], places)
        return jnp.zeros(places, jnp.int32).at[at].add(1, mode="drop")

    flat = codes.reshape(batch * heads, tables)
    counts = jax.lax.map(lambda arguments: count_head(*arguments), (jnp.arange(len(flat)), flat))
    return counts.reshape(batch, heads, places)
