"""Tokens that were drawn from a stream: each kv head holds others, with a weight in the softmax.

What reservoir sampling and BalanceKV keep beside sinks and window. Keys are stored turned to where
they stood in the text.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import slots
from jaxkv.attention import slot_attention
from jaxkv.contract import Chunk, Partial, Spec
from jaxkv.slots import Slots
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

GOLDEN = np.uint32(0x9E3779B1)  # 2^32 / golden ratio: multiples of it keep well apart
_NEVER = np.int32(2**31 - 1)
_COMPARED = 256  # slots of which each is compared with each; more are sorted


class Sample(NamedTuple):
    """S slots a row and kv head."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    positions: UInt32[Array, "B K S"]


class Leaving(NamedTuple):
    """The ring and the chunk, of which a token may leave at every new one.

    at [B,T]: which of them leaves as that token comes; there [B,T]: whether one does.
    """

    tokens: Sample
    at: Int32[Array, "B T"]
    there: Bool[Array, "B T"]


AXES = Sample(("B", "K", "S", "H"), ("B", "K", "S", "H"), ("B", "K", "S"))
# Of a state with `recent` slots and `middle`, how many tokens have left them.
SHARED = (*(f"recent.{name}" for name in slots.SHARED), "middle")


def init(spec: Spec, rows: int, slots: int) -> Sample:
    shape = (rows, spec.kv_heads, slots)
    zeros = jnp.zeros((*shape, spec.head_dim), spec.dtype)
    return Sample(zeros, zeros, jnp.zeros(shape, jnp.uint32))


def keys(key: jax.Array, spec: Spec, rows: int) -> UInt32[Array, "B K 2"]:
    """What every draw of a row and kv head follows from, beside the position."""
    return jax.random.bits(key, (rows, spec.kv_heads, 2), jnp.uint32)


def draws(numbers: UInt32[Array, "#B ... S"], key: UInt32[Array, "B K 2"]) -> Array:
    """32 bits for each number: two rounds of an integer hash, one-to-one, so without ties."""
    return _mix(_mix(numbers + key[:, :, :1]) ^ key[:, :, 1:])


def uniforms(numbers: UInt32[Array, "#B ... S"], key: UInt32[Array, "B K 2"]) -> Array:
    """The same as float32 from 0 to less than 1."""
    return (draws(numbers, key) >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


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
    """One token a kv head, k, v [B,K,H] and positions [B,K], to slot `at` [B,K] where `takes`."""

    def one(old: Array, new: Array, at: Array, takes: Array) -> Array:
        held = jax.lax.dynamic_index_in_dim(old, at, 0, keepdims=False)
        new = jnp.where(takes, new.astype(old.dtype), held)
        return jax.lax.dynamic_update_index_in_dim(old, new, at, 0)

    each = jax.vmap(jax.vmap(one))
    return Sample(
        each(sample.k, k, at, takes),
        each(sample.v, v, at, takes),
        each(sample.positions, positions, at, takes),
    )


def ranks(sample: Sample, filled: Bool[Array, "B X S"]) -> Int32[Array, "B K S"]:
    """How many filled slots of the same head hold an older token."""
    # Positions may wrap, so ages are counted back from the newest that is held.
    newest = sample.positions[:, :, :1]
    behind = (newest - sample.positions).astype(jnp.int32)  # negative: newer than the first slot
    if behind.shape[2] <= _COMPARED:
        older = (behind[:, :, None, :] > behind[:, :, :, None]) & filled[:, :, None, :]
        return jnp.sum(older, axis=3, dtype=jnp.int32)
    oldest_first = jnp.argsort(jnp.where(filled, -behind, _NEVER), axis=2)
    return jnp.argsort(oldest_first, axis=2).astype(jnp.int32)


def move(
    spec: Spec, k: Float[Array, "B K S H"], by: UInt32[Array, "B K S"]
) -> Float[Array, "B K S H"]:
    """Keys that were turned, turned on."""
    rows, heads, count, head_dim = k.shape
    turned = spec.encoding.move(
        k.reshape(rows, heads * count, 1, head_dim), by.reshape(rows, heads * count)
    )
    return turned.reshape(k.shape)


def attend(
    spec: Spec,
    q: Float[Array, "B T N H"],
    view: UInt32[Array, "B T"],
    sample: Sample,
    bias: Float32[Array, "B K T S"],
) -> Partial:
    """Attention of queries, turned to `view`, over a sample; bias: log weights, -inf not seen."""
    bias = bias[:, :, None]
    penalty = spec.encoding.bias(view, sample.positions, sample.k.shape[1])
    bias = bias if penalty is None else bias + penalty
    q = spec.encoding.rotate(q, view)
    return slot_attention(q, sample.k, sample.v, bias, spec.scale, spec.softcap)


def leaving(spec: Spec, recent: Slots, chunk: Chunk, sinks: int) -> Leaving:
    """The tokens that leave the ring of `recent` as a chunk comes."""
    kv_heads, window = recent.k.shape[1], recent.k.shape[2] - sinks
    later = chunk.valid & (slots.number(recent, chunk.valid) >= sinks)
    come = jnp.cumsum(later.astype(jnp.int32), axis=1)
    held = jnp.clip(recent.count - sinks, 0, window)
    gone = jnp.maximum(0, held[:, None] + come - window)  # how many by each token
    before = jnp.concatenate([jnp.zeros_like(gone[:, :1]), gone[:, :-1]], axis=1)
    # The n-th to leave: of the ring the oldest first, then the chunk's in their order.
    place = jnp.arange(window)[None]
    age = (recent.count[:, None] - 1 - sinks - place) % window
    nth = jnp.where(place < held[:, None], held[:, None] - 1 - age, _NEVER)
    nth = jnp.concatenate([nth, jnp.where(later, held[:, None] + come - 1, _NEVER)], axis=1)
    order = jnp.argsort(nth, axis=1).astype(jnp.int32)
    keys = spec.encoding.rotate(chunk.k, chunk.positions).transpose(0, 2, 1, 3)
    values = chunk.v.transpose(0, 2, 1, 3)
    came = jnp.concatenate([recent.positions[:, sinks:], chunk.positions], axis=1)
    tokens = Sample(
        jnp.concatenate([recent.k[:, :, sinks:], keys.astype(recent.k.dtype)], axis=2),
        jnp.concatenate([recent.v[:, :, sinks:], values.astype(recent.v.dtype)], axis=2),
        jnp.broadcast_to(came[:, None], (came.shape[0], kv_heads, came.shape[1])),
    )
    return Leaving(tokens, jnp.take_along_axis(order, before, axis=1), gone > before)


def oldest(recent: Slots, chunk: Chunk, sinks: int) -> Leaving:
    """The same where a chunk is one token: what it drives out of the ring, alone."""
    slot = slots.next_slot(recent, sinks)
    there = chunk.valid[:, 0] & (recent.count >= recent.positions.shape[1])

    def one(leaf: Array) -> Array:
        return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, 1, 1))(leaf, slot)

    position = jnp.take_along_axis(recent.positions, slot[:, None], axis=1)[:, None]
    position = jnp.broadcast_to(position, (*recent.k.shape[:2], 1))
    token = Sample(one(recent.k), one(recent.v), position)
    return Leaving(token, jnp.zeros_like(slot)[:, None], there[:, None])


def behind(chunk: Chunk, *read: Float[Array, "B ..."]) -> Chunk:
    """The same chunk, which cannot be there before these are.

    What is read of a cache must be read before the chunk is written into it: XLA:CPU, which drops
    barriers, copies the whole cache where nothing else says so. Here what is written is chosen by a
    condition on what was read, which always holds; XLA does not see that it does.
    """
    there = jnp.ones(chunk.valid.shape[0], bool)
    for leaf in read:
        first = leaf.reshape(leaf.shape[0], -1)[:, 0].astype(jnp.float32)
        sign = jax.lax.bitcast_convert_type(first, jnp.uint32) >> np.uint32(31)
        there &= sign <= np.uint32(1)
    there = there[:, None, None, None]
    return chunk._replace(k=jnp.where(there, chunk.k, 0), v=jnp.where(there, chunk.v, 0))
