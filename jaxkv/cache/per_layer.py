"""Tokens chosen for all KV heads of a layer together: one array of rows, each of one KV head.

KV heads may have different numbers of tokens without slots that stay empty. Rows stay empty where
there are fewer tokens than rows. Attention reads every row once, as it
would with equal heads. Each query is multiplied with the rows of all heads, and the rows of other
heads are masked: K times the products, with the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import rows
from jaxkv.attention import slot_attention
from jaxkv.cache import per_head
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Cached, Chunk, Leaf, Partial, Spec
from jaxkv.rows import Rows, Storage
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32


class PerLayerTokens(NamedTuple):
    """R rows per sequence. head: the KV head of each."""

    k: Rows  # [B,1,R,H]
    v: Rows
    positions: UInt32[Array, "B 1 R"]
    head: Int32[Array, "B 1 R"]


LEAVES = PerLayerTokens(Leaf("B I R H"), Leaf("B I R H"), Leaf("B I R"), Leaf("B I R"))


def leaves(storage: Storage) -> PerLayerTokens:
    """The leaves of PerLayerTokens."""
    return LEAVES._replace(k=rows.leaf(storage, LEAVES.k), v=rows.leaf(storage, LEAVES.v))


def init(spec: Spec, batch: int, size: int, storage: Storage = "float") -> PerLayerTokens:
    """Empty rows."""
    empty = per_head.init(replace(spec, kv_heads=1), batch, size, storage)
    return PerLayerTokens(*empty, jnp.zeros(empty.positions.shape, jnp.int32))


def flat(tokens: PerHeadTokens) -> PerLayerTokens:
    """The slots of all KV heads in one array, head by head."""
    batch, kv_heads, size = tokens.positions.shape
    join = lambda leaf: leaf.reshape(batch, 1, kv_heads * size, *leaf.shape[3:])
    head = jnp.repeat(jnp.arange(kv_heads), size)
    head = jnp.broadcast_to(head, (batch, 1, kv_heads * size))
    return PerLayerTokens(*jax.tree.map(join, tokens), head)


def log_weights(
    head: Int32[Array, "B 1 R"], log_weight: Float32[Array, "B 1 R"], heads: Int32[Array, " X"]
) -> Float32[Array, "B X R"]:
    """The log weight of each row for each of these KV heads, -inf where it belongs to another."""
    return jnp.where(head == heads[None, :, None], log_weight, -jnp.inf)


def attend(
    spec: Spec, chunk: Chunk, tokens: PerLayerTokens, log_weight: Float32[Array, "B 1 R"]
) -> Partial:
    """Attention of the queries of a chunk to the rows of their KV heads."""
    group = chunk.q.shape[2] // spec.kv_heads
    heads = jnp.arange(chunk.q.shape[2]) // group  # of each query head

    def bias(start: Array | int, size: int) -> Float32[Array, "B 1 N T R"]:
        cut = lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size, 2)
        weight = log_weights(cut(tokens.head), cut(log_weight), heads)
        visible = chunk.valid[:, None, None, :, None]
        weight = jnp.where(visible, weight[:, None, :, None], -jnp.inf)
        penalty = spec.encoding.bias(chunk.positions, cut(tokens.positions), 1)
        return weight if penalty is None else weight + penalty

    q = spec.encoding.rotate(chunk.q, chunk.positions)
    return slot_attention(q, tokens.k, tokens.v, bias, spec.scale, spec.softcap)


def take(
    tokens: PerHeadTokens, best: Int32[Array, "B R"], valid: Bool[Array, "B K S"]
) -> tuple[PerLayerTokens, Float32[Array, "B 1 R"]]:
    """The tokens at these places of the slots of all heads, head by head, and their log weights.

    Places that are not valid, or beyond the slots, become empty rows at the end.
    """
    batch, kv_heads, size = valid.shape
    filled = jnp.take_along_axis(valid.reshape(batch, -1), best, 1, mode="fill", fill_value=False)
    place = jnp.sort(jnp.where(filled, best, kv_heads * size), axis=1)[:, None]
    taken = per_head.pick(flat(tokens), jnp.minimum(place, kv_heads * size - 1))
    weight = jnp.where(place < kv_heads * size, np.float32(0), -jnp.inf)
    return taken, weight


def best_of_layer(
    score: Float32[Array, "B K S"], valid: Bool[Array, "B K S"], budget: int, minimum: int
) -> Int32[Array, "B R"]:
    """The highest scores of all KV heads together, `budget` a head (AdaKV, arXiv 2407.11550).

    minimum: tokens that each head has at least. Of equal scores, those of the first head come
    first. Returns places in the slots of all heads, head by head.
    """
    batch, kv_heads, size = score.shape
    score = jnp.where(valid, score, -jnp.inf)
    rank = jnp.argsort(_order(score), axis=2)
    score = jnp.where(valid & (rank < minimum), jnp.inf, score)
    _, best = jax.lax.top_k(score.reshape(batch, -1), kv_heads * min(budget, size))
    return best


def best_of_heads(
    score: Float32[Array, "B K S"],
    valid: Bool[Array, "B K S"],
    budgets: Int32[Array, "#B K"],
    total: int,
) -> Int32[Array, "B R"]:
    """The highest scores of each KV head, as many as its budget; `total` of all KV heads.

    Returns places in the slots of all heads, head by head, and one beyond them for each row that
    no head needs, because there are fewer tokens.
    """
    batch, kv_heads, size = score.shape
    order = _order(jnp.where(valid, score, -jnp.inf))
    budgets = jnp.minimum(budgets, size)
    end = jnp.cumsum(budgets, axis=1)
    row = jnp.arange(min(total, kv_heads * size), dtype=jnp.int32)[None]
    head = jnp.sum(row[..., None] >= end[:, None], axis=2, dtype=jnp.int32)
    first = jnp.take_along_axis(end - budgets, jnp.minimum(head, kv_heads - 1), axis=1)
    place = jnp.broadcast_to(head * size + row - first, (batch, row.shape[1]))
    best = jnp.take_along_axis(order.reshape(batch, -1), place, axis=1, mode="clip")
    return jnp.where(head < kv_heads, best.astype(jnp.int32) + head * size, kv_heads * size)


def _order(score: Float32[Array, "B K S"]) -> Int32[Array, "B K S"]:
    """The places of each head, the highest score first, of equal ones the oldest."""
    return jnp.argsort(-score, axis=2, stable=True)


def cached(tokens: PerLayerTokens, log_weight: Float32[Array, "B 1 R"], kv_heads: int) -> Cached:
    """The tokens of each KV head."""
    weight = log_weights(tokens.head, log_weight, jnp.arange(kv_heads))
    return Cached(jnp.broadcast_to(tokens.positions, weight.shape), weight)
