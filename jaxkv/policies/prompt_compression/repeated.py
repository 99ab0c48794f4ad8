"""Compression every N tokens: the cache of a text of any length has a constant size.

A ring has the first `sinks` tokens, the last `window`, and up to N tokens between them. When there
are N, they and the sample are compressed together to the size of the sample.

With cache-relative positions a KV head numbers its cached tokens without gaps, back from the newest
one, whose position is the one in the text. So queries and the ring need no further rotation. In
heads with more than `budget` sampled tokens, all that are further back share the furthest position
(ReRoPE does so too). Then distances stay below `capacity` + N in every head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.attention import local_attention, merge
from jaxkv.cache import per_head, per_layer, ring
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.cache.per_layer import PerLayerTokens
from jaxkv.cache.ring import Ring, RingSettings
from jaxkv.contract import Chunk, Partial, Spec, State
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32

Absorb = Callable[[State, Chunk], tuple[Partial, State]]
Compress = Callable[[State, Bool[Array, " B"]], State]  # of the sequences that are marked
Sample = PerHeadTokens | PerLayerTokens


class Sampled(NamedTuple):
    """The sampled tokens of each KV head: which rows of all heads, head by head, they are.

    first: the row of the oldest. count: how many.
    """

    first: Int32[Array, "B K"]
    count: Int32[Array, "B K"]


def in_two_passes(
    state: State, chunk: Chunk, room: Int32[Array, " B"], absorb: Absorb, compress: Compress
) -> tuple[Partial, State]:
    """Absorb a chunk, and compress each sequence when it has got `room` more tokens.

    A chunk has fewer tokens than fill a sequence twice. Tokens after the compression are absorbed
    in a second pass, which is skipped where no sequence is full. Both passes are one scan, so that
    a program has their operations once. A decode step has one condition per layer, whose cost on a
    GPU is not measured.
    """
    before = chunk.valid & (jnp.cumsum(chunk.valid, axis=1) <= room[:, None])
    full = jnp.sum(chunk.valid, axis=1) >= room

    def compress_full(state: State, full: Bool[Array, " B"]) -> State:
        return jax.lax.cond(
            jnp.any(full), lambda state: compress(state, full), lambda state: state, state
        )

    if chunk.valid.shape[1] == 1:
        attended, state = absorb(state, chunk._replace(valid=before))
        return attended, compress_full(state, full)

    def absorb_and_compress(state: State, masks: tuple[Array, Array]) -> tuple[State, Partial]:
        valid, full = masks

        def absorb_valid(state: State) -> tuple[Partial, State]:
            return absorb(state, chunk._replace(valid=valid))

        out, lse = jax.eval_shape(absorb_valid, state)[0]
        nothing = Partial(jnp.zeros(out.shape, out.dtype), jnp.full(lse.shape, -jnp.inf, lse.dtype))
        attended, state = jax.lax.cond(
            jnp.any(valid), absorb_valid, lambda state: (nothing, state), state
        )
        return compress_full(state, full), attended

    rest = chunk.valid & ~before
    masks = jnp.stack([before, rest]), jnp.stack([full, jnp.zeros_like(full)])
    state, (out, lse) = jax.lax.scan(absorb_and_compress, state, masks)
    out = jnp.where(rest[:, :, None, None], out[1], out[0])
    return Partial(out, jnp.where(rest[:, :, None], lse[1], lse[0])), state


def find_sampled(sample: Sample, log_weight: Float32[Array, "B X C"], kv_heads: int) -> Sampled:
    """Where the sampled tokens of each KV head are."""
    filled = log_weight > -jnp.inf
    if isinstance(sample, PerHeadTokens):  # the filled slots of a head are its first ones
        first = jnp.arange(kv_heads, dtype=jnp.int32) * filled.shape[2]
        count = jnp.sum(filled, axis=2, dtype=jnp.int32)
        return Sampled(jnp.broadcast_to(first[None], count.shape), count)
    filled &= sample.head == jnp.arange(kv_heads)[None, :, None]
    return Sampled(
        jnp.argmax(filled, axis=2).astype(jnp.int32), jnp.sum(filled, axis=2, dtype=jnp.int32)
    )


def in_order(exact: Ring, sample: Sample, sampled: Sampled, sinks: int, size: int) -> PerHeadTokens:
    """The cached tokens of each KV head in `size` slots, oldest first; later slots have any."""
    batch, kv_heads, slots = exact.k.shape[:3]
    positions = jnp.broadcast_to(exact.positions[:, None], (batch, kv_heads, slots))
    tokens = per_layer.flat(PerHeadTokens(exact.k, exact.v, positions))
    sampled_rows = sample if isinstance(sample, PerLayerTokens) else per_layer.flat(sample)
    tokens = per_head.join(*(PerHeadTokens(*rows[:3]) for rows in (sampled_rows, tokens)))
    slot, count = jnp.arange(size)[None, None], sampled.count[..., None]
    in_ring = jnp.minimum(jnp.where(slot < sinks, slot, slot - count), slots - 1)
    in_ring += tokens.positions.shape[2] - slots * (kv_heads - jnp.arange(kv_heads)[None, :, None])
    in_sample = (slot >= sinks) & (slot < sinks + count)
    place = jnp.where(in_sample, sampled.first[..., None] + slot - sinks, in_ring)
    picked = per_head.pick(tokens, place.reshape(batch, 1, -1))
    return jax.tree.map(lambda a: a.reshape(batch, kv_heads, size, *a.shape[3:]), picked)


def keep_ends(
    exact: Ring, sinks: int, window: int, between: Int32[Array, " B"], full: Bool[Array, " B"]
) -> Ring:
    """The ring without the `between` tokens after its sinks, in the sequences that are full."""
    source = sinks + between[:, None] + jnp.arange(window)[None]
    source = jnp.minimum(source, exact.positions.shape[1] - 1)

    def move(leaf: Array) -> Array:
        at = source[:, None, :, None]
        newest = jnp.take_along_axis(leaf, at, axis=2)
        old = leaf[:, :, sinks : sinks + window]
        newest = jnp.where(full[:, None, None, None], newest, old)
        return jax.lax.dynamic_update_slice_in_dim(leaf, newest, sinks, 2)

    k, v, positions = jax.tree.map(move, (exact.k, exact.v, exact.positions[:, None, :, None]))
    count = jnp.where(full, sinks + window, exact.count)
    return exact._replace(k=k, v=v, positions=positions[:, 0, :, 0], count=count)


class CachePositions(NamedTuple):
    """Cache-relative positions. first: that of the first sink. excess: sampled tokens that share
    the position after the sinks with the next one."""

    first: UInt32[Array, "B K"]
    excess: Int32[Array, "B K"]


def cache_positions(exact: Ring, sampled: Sampled, budget: int) -> CachePositions:
    """The positions in the cache; budget: sampled tokens that have positions of their own."""
    newest = jnp.take_along_axis(exact.positions, jnp.maximum(exact.count - 1, 0)[:, None], axis=1)
    number = exact.count[:, None] - 1 + jnp.minimum(sampled.count, budget)
    return CachePositions(
        newest - number.astype(jnp.uint32), jnp.maximum(sampled.count - budget, 0)
    )


def attend_exact(
    spec: Spec,
    before: Ring,
    after: Ring,
    chunk: Chunk,
    sinks: int,
    positions: CachePositions,
) -> Partial:
    """Attention to the tokens of the ring, with the sinks at their positions in the cache.

    before, after: the ring without and with the tokens of the chunk.
    """
    settings = RingSettings(sinks, None, False, False)
    numbers = ring.token_numbers(before, chunk.valid)
    if chunk.valid.shape[1] == 1:
        recent = ring.attend_ring(spec, after, chunk, settings)
    else:
        recent = merge(
            ring.attend_ring(spec, before, chunk, settings),
            local_attention(spec, chunk, None, numbers < sinks, before.k),
        )
    if not sinks:
        return recent
    kv_heads, slot = before.k.shape[1], jnp.arange(sinks)
    place = positions.first[..., None] + slot.astype(jnp.uint32)[None, None]
    bias = jnp.where(slot[None, None] <= numbers[:, :, None], np.float32(0), -jnp.inf)
    bias = jnp.broadcast_to(bias[:, None], (bias.shape[0], kv_heads, *bias.shape[1:]))
    text = jnp.broadcast_to(after.positions[:, None, :sinks], place.shape)
    first = rotate_to(spec, PerHeadTokens(*ring.sink_rows(after, sinks), text), place)
    return merge(recent, per_head.attend(spec, chunk.q, chunk.positions, first, bias))


def sample_at_cache_positions(
    spec: Spec, sample: Sample, sampled: Sampled, positions: CachePositions, sinks: int
) -> Sample:
    """A sample rotated from the text positions of its tokens to positions in the cache."""
    row = jnp.arange(sample.positions.shape[2])[None, None]
    if isinstance(sample, PerLayerTokens):
        of_head = lambda x: jnp.take_along_axis(x[:, None], sample.head, axis=2)
        row = row - of_head(sampled.first)
    else:
        of_head = lambda x: x[..., None]
    rank = sinks + jnp.maximum(row - of_head(positions.excess), 0)
    return rotate_to(spec, sample, of_head(positions.first) + rank.astype(jnp.uint32))


def at_cache_positions(
    spec: Spec, tokens: PerHeadTokens, sampled: Sampled, positions: CachePositions, sinks: int
) -> PerHeadTokens:
    """The tokens of `in_order` rotated to positions in the cache."""
    slot, count = jnp.arange(tokens.positions.shape[2])[None, None], sampled.count[..., None]
    rank = sinks + jnp.maximum(slot - sinks - positions.excess[..., None], 0)
    rank = jnp.where(slot < sinks, slot, rank).astype(jnp.uint32)
    place = positions.first[..., None] + rank
    return rotate_to(spec, tokens, jnp.where(slot < sinks + count, place, tokens.positions))


def rotate_to(spec: Spec, tokens: Sample, place: UInt32[Array, "B X S"]) -> Sample:
    """Tokens rotated to other positions."""
    k = per_head.rerotate(spec, tokens.k, place - tokens.positions)
    return tokens._replace(k=k, positions=place)
