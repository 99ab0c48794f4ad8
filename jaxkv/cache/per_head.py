"""A sample of evicted tokens, drawn separately for each KV head: the storage of sampling policies.

`reservoir` stores keys rotated to their position in the text. The merge-and-reduce tree, with
cache-relative positions, stores them rotated to their slot within a half.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.attention import slot_attention
from jaxkv.cache import ring
from jaxkv.cache.ring import Ring
from jaxkv.contract import Chunk, Leaf, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

GOLDEN = np.uint32(0x9E3779B1)  # 2^32 / golden ratio: its multiples are far apart
_NEVER = np.int32(2**31 - 1)
_COMPARED = 256  # slots that are ranked by comparing all pairs; more are sorted


class Sample(NamedTuple):
    """S slots per sequence and KV head; their order is up to the policy."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    positions: UInt32[Array, "B K S"]


class Evicted(NamedTuple):
    """The ring and the chunk, and which token each new token evicts.

    index [B,T]: of the evicted token in `tokens`. valid [B,T]: whether a token is evicted.
    """

    tokens: Sample
    index: Int32[Array, "B T"]
    valid: Bool[Array, "B T"]


LEAVES = Sample(Leaf("B K S H"), Leaf("B K S H"), Leaf("B K S"))


def nbytes(spec: Spec, slots: int) -> int:
    """Bytes of one sequence."""
    return spec.kv_heads * slots * (spec.kv_bytes + 4)


def check_exponent(exponent: float, weighted: bool) -> None:
    """Raise UserError for an impossible exponent of the weights of sampled tokens."""
    if not 0 <= exponent <= 1:
        raise UserError(f"exponent must be from 0 to 1, got {exponent}; try exponent=0.25")
    if exponent != 1 and not weighted:
        raise UserError(f"exponent={exponent} belongs to weighted=true; give both or neither")


def init(spec: Spec, batch: int, slots: int) -> Sample:
    """Empty slots."""
    shape = (batch, spec.kv_heads, slots)
    zeros = jnp.zeros((*shape, spec.head_dim), spec.dtype)
    return Sample(zeros, zeros, jnp.zeros(shape, jnp.uint32))


def seeds(rng: jax.Array, spec: Spec, batch: int) -> UInt32[Array, "B K 2"]:
    """The seeds of all draws, one per sequence and KV head."""
    return jax.random.bits(rng, (batch, spec.kv_heads, 2), jnp.uint32)


def draws(numbers: UInt32[Array, "#B ... S"], rng: UInt32[Array, "B K 2"]) -> Array:
    """32 random bits per number: two rounds of a one-to-one integer hash, so without ties."""
    return _mix(_mix(numbers + rng[:, :, :1]) ^ rng[:, :, 1:])


def uniforms(numbers: UInt32[Array, "#B ... S"], rng: UInt32[Array, "B K 2"]) -> Array:
    """The same draws as float32 in [0, 1)."""
    return (draws(numbers, rng) >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def _mix(x: UInt32[Array, "B K S"]) -> UInt32[Array, "B K S"]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


def pick(sample: Sample, places: Array) -> Sample:
    """The slots at places [B,K,S']."""
    take = lambda a: jnp.take_along_axis(a, places[..., None], axis=2)  # noqa: E731
    return Sample(take(sample.k), take(sample.v), jnp.take_along_axis(sample.positions, places, 2))


def join(*parts: Sample) -> Sample:
    return Sample(*(jnp.concatenate(leaves, axis=2) for leaves in zip(*parts, strict=True)))


def put(sample: Sample, at: Array, takes: Array, k: Array, v: Array, positions: Array) -> Sample:
    """Write one token per KV head to slot `at` [B,K] where `takes`; k, v [B,K,H]."""

    def one(old: Array, new: Array, at: Array, takes: Array) -> Array:
        before = jax.lax.dynamic_index_in_dim(old, at, 0, keepdims=False)
        new = jnp.where(takes, new.astype(old.dtype), before)
        return jax.lax.dynamic_update_index_in_dim(old, new, at, 0)

    each = jax.vmap(jax.vmap(one))
    return Sample(
        each(sample.k, k, at, takes),
        each(sample.v, v, at, takes),
        each(sample.positions, positions, at, takes),
    )


def ranks(sample: Sample, filled: Bool[Array, "B X S"]) -> Int32[Array, "B K S"]:
    """How many filled slots of the same KV head store an older token."""
    # Positions may wrap, so ages are distances back from the first slot.
    first = sample.positions[:, :, :1]
    age = (first - sample.positions).astype(jnp.int32)  # negative: newer than the first slot
    if age.shape[2] <= _COMPARED:
        older = (age[:, :, None, :] > age[:, :, :, None]) & filled[:, :, None, :]
        return jnp.sum(older, axis=3, dtype=jnp.int32)
    oldest_first = jnp.argsort(jnp.where(filled, -age, _NEVER), axis=2)
    return jnp.argsort(oldest_first, axis=2).astype(jnp.int32)


def rerotate(
    spec: Spec, k: Float[Array, "B K S H"], by: UInt32[Array, "B K S"]
) -> Float[Array, "B K S H"]:
    """Rotated keys, rotated further by a number of positions."""
    batch, heads, count, head_dim = k.shape
    rotated = spec.encoding.rerotate(
        k.reshape(batch, heads * count, 1, head_dim), by.reshape(batch, heads * count)
    )
    return rotated.reshape(k.shape)


def attend(
    spec: Spec,
    q: Float[Array, "B T N H"],
    query_positions: UInt32[Array, "B T"],
    sample: Sample,
    bias: Float32[Array, "B K T S"],
) -> Partial:
    """Attention of queries at these positions to a sample; bias: log weights, -inf where masked."""
    bias = bias[:, :, None]
    penalty = spec.encoding.bias(query_positions, sample.positions, sample.k.shape[1])
    bias = bias if penalty is None else bias + penalty
    q = spec.encoding.rotate(q, query_positions)
    return slot_attention(q, sample.k, sample.v, bias, spec.scale, spec.softcap)


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
    keys = spec.encoding.rotate(chunk.k, chunk.positions).transpose(0, 2, 1, 3)
    values = chunk.v.transpose(0, 2, 1, 3)
    positions = jnp.concatenate([recent.positions[:, sinks:], chunk.positions], axis=1)
    tokens = Sample(
        jnp.concatenate([recent.k[:, :, sinks:], keys.astype(recent.k.dtype)], axis=2),
        jnp.concatenate([recent.v[:, :, sinks:], values.astype(recent.v.dtype)], axis=2),
        jnp.broadcast_to(positions[:, None], (positions.shape[0], kv_heads, positions.shape[1])),
    )
    return Evicted(tokens, jnp.take_along_axis(order, before, axis=1), gone > before)


def evicted_by_token(recent: Ring, chunk: Chunk, sinks: int) -> Evicted:
    """The token that leaves the ring while a chunk of one token arrives."""
    slot = ring.next_slot(recent, sinks)
    valid = chunk.valid[:, 0] & (recent.count >= recent.positions.shape[1])

    def one(leaf: Array) -> Array:
        return jax.vmap(lambda slots, at: jax.lax.dynamic_slice_in_dim(slots, at, 1, 1))(leaf, slot)

    position = jnp.take_along_axis(recent.positions, slot[:, None], axis=1)[:, None]
    position = jnp.broadcast_to(position, (*recent.k.shape[:2], 1))
    token = Sample(one(recent.k), one(recent.v), position)
    return Evicted(token, jnp.zeros_like(slot)[:, None], valid[:, None])
