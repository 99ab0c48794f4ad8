"""Tokens of all KV heads of a layer in one pool of rows, each with the KV head that owns it.

KV heads may have different numbers of tokens without a slot that stays empty. Attention reads every
row once, as it would with equal heads. Each query is multiplied with the rows of all heads, and the
rows of other heads are masked: K times the products, with the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv import rows
from jaxkv.attention import slot_attention
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Cached, Chunk, Leaf, Partial, Spec
from jaxkv.rows import Rows, Storage
from jaxkv.typing import Array, Float32, Int32, UInt32


class Pool(NamedTuple):
    """R rows per sequence. owner: the KV head of each."""

    k: Rows  # [B,1,R,H]
    v: Rows
    positions: UInt32[Array, "B 1 R"]
    owner: Int32[Array, "B 1 R"]


LEAVES = Pool(Leaf("B I R H"), Leaf("B I R H"), Leaf("B I R"), Leaf("B I R"))


def leaves(storage: Storage) -> Pool:
    """The leaves of a pool."""
    return LEAVES._replace(k=rows.leaf(storage, LEAVES.k), v=rows.leaf(storage, LEAVES.v))


def flat(tokens: PerHeadTokens) -> Pool:
    """The slots of all KV heads as one pool, head by head."""
    batch, kv_heads, size = tokens.positions.shape
    join = lambda leaf: leaf.reshape(batch, 1, kv_heads * size, *leaf.shape[3:])  # noqa: E731
    owner = jnp.broadcast_to(jnp.repeat(jnp.arange(kv_heads), size), (batch, 1, kv_heads * size))
    return Pool(*jax.tree.map(join, tokens), owner)


def log_weights(
    owner: Int32[Array, "B 1 R"], log_weight: Float32[Array, "B 1 R"], heads: Int32[Array, " X"]
) -> Float32[Array, "B X R"]:
    """The log weight of each row for each of these KV heads, -inf where it belongs to another."""
    return jnp.where(owner == heads[None, :, None], log_weight, -jnp.inf)


def attend(spec: Spec, chunk: Chunk, pool: Pool, log_weight: Float32[Array, "B 1 R"]) -> Partial:
    """Attention of the queries of a chunk to the rows of their KV heads."""
    group = chunk.q.shape[2] // spec.kv_heads
    head_of_query = jnp.arange(chunk.q.shape[2]) // group

    def bias(start: Array | int, size: int) -> Float32[Array, "B 1 N T R"]:
        cut = lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size, 2)  # noqa: E731
        weight = log_weights(cut(pool.owner), cut(log_weight), head_of_query)
        visible = chunk.valid[:, None, None, :, None]
        weight = jnp.where(visible, weight[:, None, :, None], -jnp.inf)
        penalty = spec.encoding.bias(chunk.positions, cut(pool.positions), 1)
        return weight if penalty is None else weight + penalty

    q = spec.encoding.rotate(chunk.q, chunk.positions)
    return slot_attention(q, pool.k, pool.v, bias, spec.scale, spec.softcap)


def cached(pool: Pool, log_weight: Float32[Array, "B 1 R"], kv_heads: int) -> Cached:
    """The tokens of each KV head."""
    weight = log_weights(pool.owner, log_weight, jnp.arange(kv_heads))
    return Cached(jnp.broadcast_to(pool.positions, weight.shape), weight)
