"""Forms that a reader would write first, where a workaround for XLA:CPU replaced several lines.

Each computes what the library's function of that name computes, for caches in floats.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Partial
from jaxkv.pallas_kernels import host_memory
from jaxkv.policies.magicpig.hash_tables import WORD, Tables
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

_BLOCKS = 512  # blocks read at a time, as in the library


def scores(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    scale: float,
    softcap: float | None = None,
) -> Float32[Array, "B K G T S"]:
    """`attention.scores` with B and K as two axes."""
    batch, queries, heads, head_dim = q.shape
    q = q.reshape(batch, queries, k.shape[1], heads // k.shape[1], head_dim)
    logits = jnp.einsum("btkgh,bksh->bkgts", q, k, precision="highest") * np.float32(scale)
    return logits if softcap is None else np.float32(softcap) * jnp.tanh(logits / softcap)


def blend(logits: Float32[Array, "B K G T S"], v: Float[Array, "B K S H"]) -> Partial:
    """`attention.blend` with B and K as two axes."""
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, np.float32(0), top)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe = jnp.where(total == 0, np.float32(1), total)
    out = jnp.einsum("bkgts,bksh->bkgth", weights, v, precision="highest") / safe
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))[..., 0]
    batch, kv_heads, group, queries, _ = out.shape
    by_query = (batch, queries, kv_heads * group)
    out = out.transpose(0, 3, 1, 2, 4).reshape(*by_query, -1)
    return Partial(out, lse.transpose(0, 3, 1, 2).reshape(by_query))


def tally(
    tables: Tables,
    kv_head: Int32[Array, ""],
    code: Int32[Array, " L"],
    places: int,
    min_tables: int,
) -> UInt32[Array, " W"]:
    """`hash_tables.tally` with one byte per count, or two."""
    count, capacity, wide = tables.entries.shape[2:]
    entries, first = tables.entries.reshape(-1, wide), tables.first.reshape(-1)
    table = kv_head * count + jnp.arange(count, dtype=jnp.int32)
    bucket = table * tables.first.shape[3] + code
    begin, end = (host_memory.take(first, bucket + i) for i in (0, 1))
    upto = jnp.cumsum(end - begin)
    base = table * capacity + begin - (upto - (end - begin))
    total = upto[-1]

    def count_blocks(i: Array, counts: Array) -> Array:
        j = i * _BLOCKS + jnp.arange(_BLOCKS, dtype=jnp.int32)
        mine = jnp.searchsorted(upto, j, side="right").astype(jnp.int32)
        mine = base.at[jnp.minimum(mine, count - 1)].get(mode="promise_in_bounds")
        entry = host_memory.take(entries, jnp.where(j < total, j + mine, 0)).astype(jnp.int32)
        valid = (j < total)[:, None] & (entry > 0)
        return counts.at[jnp.maximum(entry, 1) - 1].add(valid.astype(counts.dtype))

    counts = jnp.zeros(places, jnp.uint8 if count < 2**8 else jnp.uint16)
    counts = jax.lax.fori_loop(0, -(-total // _BLOCKS), count_blocks, counts)
    return pack(counts >= min_tables)


def pack(selected: Bool[Array, " P"]) -> UInt32[Array, " W"]:
    """32 places per word, the first in its lowest bit."""
    selected = jnp.pad(selected, (0, -selected.shape[0] % WORD)).reshape(-1, WORD)
    place = np.uint32(1) << np.arange(WORD, dtype=np.uint32)
    return jnp.sum(jnp.where(selected, place, np.uint32(0)), axis=1, dtype=jnp.uint32)


def sort_codes(codes: Int32[Array, "L S"], bits: int) -> tuple[Array, Array]:
    """`xla_cpu.sort_codes` of pairs of a code and a place."""
    place = jnp.broadcast_to(jnp.arange(codes.shape[1], dtype=jnp.int32), codes.shape)
    return tuple(jax.lax.sort((codes, place), dimension=1, num_keys=1, is_stable=True))
