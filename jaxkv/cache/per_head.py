"""Tokens chosen separately for each KV head: samples, heavy hitters, compressed prompts.

`reservoir` stores keys rotated to their position in the text. The merge-and-reduce tree, with
cache-relative positions, stores floats rotated to their slot within a half. Rows in int8 stay as
the ring stored them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import rows
from jaxkv.attention import slot_attention
from jaxkv.cache import ring
from jaxkv.cache.ring import Ring
from jaxkv.contract import Chunk, Leaf, Partial, Spec
from jaxkv.errors import UserError, check_int
from jaxkv.pallas_kernels.flash_attention import KeySet
from jaxkv.platform import gpu as xla_gpu
from jaxkv.rows import Rows, Storage
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

_NEVER = np.int32(2**31 - 1)


class PerHeadTokens(NamedTuple):
    """S slots per sequence and KV head; their order is up to the policy."""

    k: Rows  # [B,K,S,H]
    v: Rows
    positions: UInt32[Array, "B K S"]


Tokens = TypeVar("Tokens")  # a NamedTuple of arrays [B,K,S,*]


class Evicted(NamedTuple):
    """The ring and the chunk, and which token each new token evicts.

    index [B,T]: the place in `tokens` of the token that each new token evicts. valid [B,T]: whether
    it evicts one.
    """

    tokens: PerHeadTokens
    index: Int32[Array, "B T"]
    valid: Bool[Array, "B T"]


LEAVES = PerHeadTokens(Leaf("B K S H"), Leaf("B K S H"), Leaf("B K S"))


def leaves(storage: Storage, like: PerHeadTokens = LEAVES) -> PerHeadTokens:
    """The leaves of a PerHeadTokens; like: those of the same tokens in floats."""
    return like._replace(k=rows.leaf(storage, like.k), v=rows.leaf(storage, like.v))


def nbytes(spec: Spec, slots: int, storage: Storage = "float") -> int:
    """Bytes of one sequence."""
    return spec.kv_heads * slots * (rows.nbytes(spec, storage) + 4)


def check_exponent(exponent: float, weighted: bool) -> None:
    """Raise UserError for an impossible exponent of the weights of sampled tokens."""
    if not 0 <= exponent <= 1:
        raise UserError(f"exponent must be from 0 to 1, got {exponent}; try exponent=0.25")
    if exponent != 1 and not weighted:
        raise UserError(f"exponent={exponent} belongs to weighted=true; give both or neither")


def init(spec: Spec, batch: int, slots: int, storage: Storage = "float") -> PerHeadTokens:
    """Empty slots."""
    check_int("batch", batch)
    positions = jnp.zeros((batch, spec.kv_heads, slots), jnp.uint32)
    return PerHeadTokens(*rows.zeros(spec, batch, slots, storage), positions)


def pick(sample: Tokens, places: Int32[Array, "B K X"]) -> Tokens:
    """The slots at these places."""

    def take(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, places.reshape(*places.shape, *[1] * (leaf.ndim - 3)), 2)

    return jax.tree.map(take, sample)


def join(*parts: PerHeadTokens) -> PerHeadTokens:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=2), *parts)


def put(sample: PerHeadTokens, at: Array, mask: Array, token: PerHeadTokens) -> PerHeadTokens:
    """Write a token, a sample of one slot, to slot `at` [B,K] of each KV head, where mask [B,K]."""

    if xla_gpu.scatters_per_head():
        return jax.tree.map(
            lambda old, new: xla_gpu.scatter_per_head(old, new, at, mask), sample, token
        )

    def write_slot(old: Array, new: Array, at: Array, mask: Array) -> Array:
        before = jax.lax.dynamic_index_in_dim(old, at, 0, keepdims=False)
        new = jnp.where(mask, new[0].astype(old.dtype), before)
        return jax.lax.dynamic_update_index_in_dim(old, new, at, 0)

    write_heads = jax.vmap(jax.vmap(write_slot))
    return jax.tree.map(lambda old, new: write_heads(old, new, at, mask), sample, token)


def ranks(sample: PerHeadTokens, filled: Bool[Array, "B X S"]) -> Int32[Array, "B K S"]:
    """How many filled slots of the same KV head store an older token."""
    # Positions may wrap, so ages are distances back from the first slot.
    first = sample.positions[:, :, :1]
    age = (first - sample.positions).astype(jnp.int32)  # negative: newer than the first slot
    if age.shape[2] <= xla_gpu.slots_compared():
        older = (age[:, :, None, :] > age[:, :, :, None]) & filled[:, :, None, :]
        return jnp.sum(older, axis=3, dtype=jnp.int32)
    oldest_first = jnp.argsort(jnp.where(filled, -age, _NEVER), axis=2)
    return jnp.argsort(oldest_first, axis=2).astype(jnp.int32)


def rerotate(spec: Spec, k: Rows, by: UInt32[Array, "B K S"]) -> Float[Array, "B K S H"]:
    """Rotated keys [B,K,S,H], rotated further by a number of positions, as floats."""
    batch, heads, count, head_dim = k.shape
    rotated = spec.encoding.rerotate(
        rows.dequantise(k).reshape(batch, heads * count, 1, head_dim),
        by.reshape(batch, heads * count),
    )
    return rotated.reshape(k.shape).astype(spec.dtype)


def attend(
    spec: Spec,
    q: Float[Array, "B T N H"],
    query_positions: UInt32[Array, "B T"],
    sample: PerHeadTokens,
    bias: Float32[Array, "B K T S"],
) -> Partial:
    """Attention of queries at these positions to a sample; bias: log weights, -inf where masked."""
    bias = bias[:, :, None]
    penalty = spec.encoding.bias(query_positions, sample.positions, sample.k.shape[1])
    bias = bias if penalty is None else bias + penalty
    q = spec.encoding.rotate(q, query_positions)
    return slot_attention(q, sample.k, sample.v, bias, spec.scale, spec.softcap)


def key_set(
    spec: Spec,
    q: Float[Array, "B 1 N H"],
    query_positions: UInt32[Array, "B 1"],
    sample: PerHeadTokens,
    bias: Float32[Array, "#B #K 1 S"],
) -> KeySet:
    """The keys of `attend` for one token, as `flash_attention` reads them."""
    q = spec.encoding.rotate(q, query_positions)
    end = jnp.full(query_positions.shape, sample.k.shape[2], jnp.int32)
    return KeySet(q, sample.k, sample.v, end, bias[:, :, 0])


def evicted_by_chunk(spec: Spec, recent: Ring, chunk: Chunk, sinks: int) -> Evicted:
    """The tokens that leave the ring of `recent` while a chunk arrives."""
    kv_heads, window = recent.k.shape[1], recent.k.shape[2] - sinks
    later = chunk.valid & (ring.token_numbers(recent, chunk.valid) >= sinks)
    arrived = jnp.cumsum(later.astype(jnp.int32), axis=1)
    stored = jnp.clip(recent.count - sinks, 0, window)
    gone = jnp.maximum(0, stored[:, None] + arrived - window)  # evicted by each token's arrival
    before = jnp.concatenate([jnp.zeros_like(gone[:, :1]), gone[:, :-1]], axis=1)
    # The order of eviction: the ring from its oldest token on, then the chunk.
    place = jnp.arange(window)[None]
    age = (recent.count[:, None] - 1 - sinks - place) % window
    nth = jnp.where(place < stored[:, None], stored[:, None] - 1 - age, _NEVER)
    chunk_nth = jnp.where(later, stored[:, None] + arrived - 1, _NEVER)
    nth = jnp.concatenate([nth, chunk_nth], axis=1)
    order = jnp.argsort(nth, axis=1).astype(jnp.int32)
    positions = jnp.concatenate([recent.positions[:, sinks:], chunk.positions], axis=1)
    k, v = ring.new_rows(spec, chunk, chunk.positions.astype(jnp.int32), ring.PLAIN)

    def with_chunk(stored: Rows, new: Array) -> Rows:
        old = rows.cut(stored, sinks, sinks + window)
        pairs = old, rows.store(new, old)
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), *pairs)

    tokens = PerHeadTokens(
        with_chunk(recent.k, k),
        with_chunk(recent.v, v),
        jnp.broadcast_to(positions[:, None], (positions.shape[0], kv_heads, positions.shape[1])),
    )
    return Evicted(tokens, jnp.take_along_axis(order, before, axis=1), gone > before)


def evicted_by_token(recent: Ring, chunk: Chunk, sinks: int) -> Evicted:
    """The token that leaves the ring while a chunk of one token arrives."""
    slot = ring.next_slot(recent, sinks)
    valid = chunk.valid[:, 0] & (recent.count >= recent.positions.shape[1])

    def slice_slot(leaf: Array) -> Array:
        return jax.vmap(lambda slots, at: jax.lax.dynamic_slice_in_dim(slots, at, 1, 1))(leaf, slot)

    position = jnp.take_along_axis(recent.positions, slot[:, None], axis=1)[:, None]
    position = jnp.broadcast_to(position, (*recent.k.shape[:2], 1))
    token = PerHeadTokens(*jax.tree.map(slice_slot, recent[:2]), position)
    return Evicted(token, jnp.zeros_like(slot)[:, None], valid[:, None])
