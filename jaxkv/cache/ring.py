"""Sinks and a ring buffer of keys and values [B,K,S,H], or a dense cache, which evicts nothing.

Token number n of a sequence goes to slot n while there is room. After that, a new token overwrites
the oldest one after the sinks. The sinks are never overwritten: a softmax puts the weight that it
does not need on the first tokens (StreamingLLM, section 3.1). Keys are stored rotated to their
final position, so no key is rotated twice.

With storage=int8 all rows are in int8 (rows.py), and `exact_sinks` has the first tokens in full
precision too. These are read in place of their rows.

`count` [B] is the number of tokens written. Beyond `size`, a ring reduces it to size .. 2 size -
sinks - 1, with the same next slot, so it never overflows. A dense cache sets it to OVERFULL when a
token is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import rows
from jaxkv.attention import (
    blend,
    chunk_keys,
    local_attention,
    masked_bias,
    merge,
    scores,
    slot_attention,
    within,
)
from jaxkv.contract import Cached, Chunk, Leaf, Partial, Spec
from jaxkv.errors import UserError, check_choice, check_int
from jaxkv.pallas_kernels.flash_attention import KeySet, flash_attention
from jaxkv.platform import cpu as xla_cpu
from jaxkv.platform import gpu as xla_gpu
from jaxkv.rows import OVERFULL, Rows, Storage
from jaxkv.typing import Array, Bool, Float, Int32, UInt32


class RingSettings(NamedTuple):
    """How a ring stores and shows tokens.

    sinks: first tokens that are never overwritten. window: a query sees tokens fewer than this many
    positions back, and sinks; None: all that are stored. cache_relative: a sink's position is its
    slot, and not its index in the text. evict: tokens beyond the last slot overwrite the
    oldest; otherwise they are lost and `count` becomes OVERFULL.
    """

    sinks: int = 0
    window: int | None = None
    cache_relative: bool = True
    evict: bool = True


class ExactSinks(NamedTuple):
    """The keys and values of P sinks in full precision."""

    k: Float[Array, "B K P H"]
    v: Float[Array, "B K P H"]


class Ring(NamedTuple):
    """S slots per sequence: rotated keys, values, the position of each, and the tokens written.

    exact_sinks: None unless the policy has sinks and its rows are in int8.
    """

    k: Rows  # [B,K,S,H]
    v: Rows
    positions: UInt32[Array, "B S"]
    count: Int32[Array, " B"]
    exact_sinks: ExactSinks | None = None


# The number of tokens that the cache stores between the sinks and the ring, if it has a sample.
NumSampled = Int32[Array, "#B #T"] | int
PLAIN = RingSettings()  # no sinks
LEAVES = Ring(Leaf("B K S H"), Leaf("B K S H"), Leaf("B S", shared=True), Leaf("B", shared=True))
DENSE_LEAVES = LEAVES._replace(
    k=Leaf("B K S H", append_only=True),
    v=Leaf("B K S H", append_only=True),
    positions=Leaf("B S", shared=True, append_only=True),
)
_EXACT_SINKS = ExactSinks(Leaf("B K P H"), Leaf("B K P H"))
_WHOLE_MASK = 2**24  # elements of a mask that may be in memory at once: 64 MiB


def check(sinks: int, window: int, positions: str) -> None:
    """Raise UserError for impossible settings of a ring."""
    if window < 1:
        raise UserError(f"window must be at least 1, got {window}; use 1 or more")
    if sinks < 0:
        raise UserError(f"sinks must be 0 or more, got {sinks}; try sinks=4")
    check_choice("positions", positions, ("relative", "absolute"))


def leaves(storage: Storage, sinks: int, like: Ring = LEAVES) -> Ring:
    """The leaves of a Ring; like: those of the same ring in floats."""
    k, v = (rows.leaf(storage, leaf) for leaf in like[:2])
    exact_sinks = _EXACT_SINKS if storage == "int8" and sinks else None
    return like._replace(k=k, v=v, exact_sinks=exact_sinks)


def nbytes(spec: Spec, slots: int, storage: Storage = "float", sinks: int = 0) -> int:
    """Bytes of one sequence: keys, values, positions and the count."""
    exact = sinks * spec.kv_heads * spec.kv_bytes if storage == "int8" else 0
    return slots * (spec.kv_heads * rows.nbytes(spec, storage) + 4) + exact + 4


def init(spec: Spec, batch: int, slots: int, storage: Storage = "float", sinks: int = 0) -> Ring:
    """Empty slots. sinks: how many of them are also stored in full precision, with storage=int8."""
    check_int("batch", batch)
    positions, count = jnp.zeros((batch, slots), jnp.uint32), jnp.zeros((batch,), jnp.int32)
    exact = storage == "int8" and sinks
    exact_sinks = ExactSinks(*rows.zeros(spec, batch, sinks, "float")) if exact else None
    return Ring(*rows.zeros(spec, batch, slots, storage), positions, count, exact_sinks)


def reserve(ring: Ring, tokens: int, max_slots: int = rows.MAX_SLOTS) -> Ring:
    """Room for `tokens` tokens in all, by doubling. Raises UserError above `max_slots`."""
    return grow(ring, rows.slots_for(tokens, ring.positions.shape[1], max_slots))


def grow(ring: Ring, size: int) -> Ring:
    """The same tokens in `size` slots."""
    if size == ring.positions.shape[1]:
        return ring
    padding = ((0, 0), (0, 0), (0, size - ring.positions.shape[1]), (0, 0))
    k, v = jax.tree.map(lambda leaf: jnp.pad(leaf, padding), (ring.k, ring.v))
    return ring._replace(k=k, v=v, positions=jnp.pad(ring.positions, (padding[0], padding[2])))


def dense_settings(ring: Ring) -> RingSettings:
    """The settings of a dense cache. Its sinks are the tokens stored in full precision too."""
    sinks = 0 if ring.exact_sinks is None else ring.exact_sinks.k.shape[2]
    return RingSettings(sinks, None, False, False)


def _advance(ring: Ring, new: Array, settings: RingSettings) -> Array:
    """The count after `new` tokens.

    Beyond the last slot it is reduced to a count with the same next slot. Where nothing is evicted
    it becomes OVERFULL, which no later growth undoes.
    """
    # An overfull sequence stays overfull: its count is larger than every size.
    total, size = jnp.minimum(ring.count, OVERFULL - new) + new, ring.positions.shape[1]
    beyond = size + (total - size) % (size - settings.sinks) if settings.evict else OVERFULL
    return jnp.where(total <= size, total, beyond)


def token_numbers(ring: Ring, valid: Bool[Array, "B T"]) -> Int32[Array, "B T"]:
    """Each token's number in its sequence, from 0 and reduced like `count`; -1 for padding."""
    ordinal = ring.count[:, None] + jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1
    return jnp.where(valid, ordinal, -1)


def new_rows(
    spec: Spec, chunk: Chunk, numbers: Int32[Array, "B T"], settings: RingSettings
) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    """The chunk's keys, rotated to the positions at which they are stored, and its values.

    A sink's cache-relative position never changes, so a sink is stored rotated to it. Every other
    key is stored rotated to its position in the text.
    """
    positions = chunk.positions
    if settings.sinks and settings.cache_relative:
        positions = jnp.where(numbers < settings.sinks, numbers.astype(jnp.uint32), positions)
    keys = spec.encoding.rotate(chunk.k, positions)
    return keys.transpose(0, 2, 1, 3), chunk.v.transpose(0, 2, 1, 3)


def update(spec: Spec, ring: Ring, chunk: Chunk, settings: RingSettings) -> tuple[Partial, Ring]:
    """Attend to the sinks, the ring and the chunk; absorb the chunk."""
    if chunk.valid.shape[1] == 1:
        partial, after = decode(spec, ring, chunk, settings)
    else:
        partial = attend(spec, ring, chunk, settings)
        after = write(spec, ring, chunk, settings, partial)
    return partial if settings.evict else refuse_overfull(partial, after), after


def refuse_overfull(partial: Partial, after: Ring) -> Partial:
    """NaN for sequences that got more tokens than they have slots."""
    over = after.count > after.positions.shape[1]
    return partial._replace(out=jnp.where(over[:, None, None, None], jnp.nan, partial.out))


def write(
    spec: Spec,
    ring: Ring,
    chunk: Chunk,
    settings: RingSettings = PLAIN,
    read: Partial | None = None,
) -> Ring:
    """Absorb a chunk of any length. If several tokens belong in one slot, the newest stays.

    read: attention that has read the ring, in a program that writes to it in place.
    """
    if not settings.evict:
        rows.check_room(ring.count, chunk.valid, ring.positions.shape[1])
    numbers = token_numbers(ring, chunk.valid)
    chunk_rows = new_rows(spec, chunk, numbers, settings)
    stored = tuple(map(rows.store, chunk_rows, ring[:2]))
    write_tokens = _write_one if chunk.valid.shape[1] == 1 else _write_many
    stored, positions = xla_gpu.write_after(read, (stored, chunk.positions))
    out = write_tokens(ring, chunk._replace(positions=positions), stored, settings)
    if ring.exact_sinks is not None:
        exact_sinks, _ = write_sinks(ring, chunk, chunk_rows, numbers, settings.sinks)
        out = out._replace(exact_sinks=exact_sinks)
    return out


def _write_many(
    ring: Ring, chunk: Chunk, stored: tuple[Rows, Rows], settings: RingSettings
) -> Ring:
    """Write several tokens, some of which may belong in one slot. stored: their rows."""
    sinks, evict = settings.sinks, settings.evict
    tokens, size = chunk.valid.shape[1], ring.positions.shape[1]
    new = jnp.sum(chunk.valid, axis=1, dtype=jnp.int32)
    # Valid tokens first, in order: the n-th new token is at place n.
    places = jnp.argsort(~chunk.valid, axis=1, stable=True)

    def write_range(into: Ring, start: Int32[Array, " B"], width: int) -> Ring:
        """Write the tokens that belong into slots start .. start+width-1 of each sequence."""
        slot = start[:, None] + jnp.arange(width)[None, :]
        last = (ring.count + new - 1)[:, None]
        # Of all token numbers that map to a slot of the ring, the largest.
        newest = last - (last - slot) % (size - sinks)
        number = jnp.where(slot < sinks, slot, newest) if evict else slot
        offset = number - ring.count[:, None]
        mask = (offset >= 0) & (number <= last) & (number >= jnp.minimum(slot, sinks))
        source = jnp.take_along_axis(places, jnp.where(mask, offset, 0), axis=1)

        def write_rows(cache: Array, tokens: Array) -> Array:  # [B,K,S,*], [B,K,T,*]
            tokens = jnp.take_along_axis(tokens, source[:, None, :, None], axis=2)
            return write_slots(cache, tokens, start, mask)

        k, v = jax.tree.map(write_rows, into[:2], stored)
        positions = jnp.take_along_axis(chunk.positions, source, axis=1)
        return into._replace(
            k=k, v=v, positions=write_slots(into.positions, positions, start, mask)
        )

    if tokens >= min(size // 2, size - sinks):
        out = write_range(ring, jnp.zeros_like(ring.count), size)
    else:  # only two stretches change: after the newest token, and at the start of the ring
        out = write_range(ring, jnp.minimum(next_slot(ring, sinks), size - tokens), tokens)
        if evict:
            out = write_range(out, jnp.full_like(ring.count, sinks), tokens)
    return out._replace(count=_advance(ring, new, settings))


def next_slot(ring: Ring, sinks: int) -> Int32[Array, " B"]:
    """The slot that the next token of each sequence takes."""
    size = ring.positions.shape[1]
    beyond = sinks + (ring.count - sinks) % (size - sinks)
    return jnp.where(ring.count < size, ring.count, beyond)


def write_slots(
    cache: Array, new: Array, start: Int32[Array, " B"], mask: Bool[Array, "B W"]
) -> Array:
    """A cache with new tokens from slot `start` on, where mask.

    cache: [B,K,S,H] or [B,S]. new: [B,K,W,H] or [B,W].
    """
    axis, width = 0 if cache.ndim == 2 else 1, mask.shape[1]
    if xla_gpu.writes_by_scatter(cache, width):
        return xla_gpu.scatter_slot(cache, new, start, mask)
    mask = mask if cache.ndim == 2 else mask[:, None, :, None]
    if width == cache.shape[axis + 1]:
        return jnp.where(mask, new.astype(cache.dtype), cache)

    def write_sequence(old: Array, new: Array, start: Array, mask: Array) -> Array:
        # Reading the old slots first keeps padding from changing a bit.
        before = jax.lax.dynamic_slice_in_dim(old, start, width, axis)
        new = jnp.where(mask, new.astype(cache.dtype), before)
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis)

    return xla_cpu.map_sequences(write_sequence, cache, new, start, mask)


def _write_one(ring: Ring, chunk: Chunk, stored: tuple[Rows, Rows], settings: RingSettings) -> Ring:
    """Write one token; stored: its rows."""
    size, slot = ring.positions.shape[1], next_slot(ring, settings.sinks)
    written = chunk.valid if settings.evict else chunk.valid & (ring.count < size)[:, None]
    k, v, positions = jax.tree.map(
        lambda cache, new: write_slots(cache, new, slot, written),
        (ring.k, ring.v, ring.positions),
        (*stored, chunk.positions),
    )
    new = chunk.valid[:, 0].astype(jnp.int32)
    return Ring(k, v, positions, _advance(ring, new, settings))


def cache_relative_positions(
    ring: Ring, numbers: Int32[Array, "B T"], num_sampled: NumSampled = 0
) -> UInt32[Array, "B T"]:
    """The position of each query within the cache (StreamingLLM, section 3.2)."""
    last = ring.positions.shape[1] - 1
    return (jnp.clip(numbers, 0, last) + num_sampled).astype(jnp.uint32)


def attend(
    spec: Spec, ring: Ring, chunk: Chunk, settings: RingSettings, num_sampled: NumSampled = 0
) -> Partial:
    """Attention of the tokens of a chunk. `decode` is the simpler form for one token.

    A chunk may overwrite slots that its first tokens still see, so it is written afterwards. Three
    parts are merged: the sinks, those of this chunk too; the ring before the chunk; the chunk.
    """
    if xla_gpu.reads_by_flash(spec, chunk.q, ring.k):
        sets = key_sets(spec, ring, chunk, settings, num_sampled)
        return Partial(*flash_attention(sets, spec.scale, spec.softcap))
    sinks, numbers = settings.sinks, token_numbers(ring, chunk.valid)
    kv_heads = ring.k.shape[1]
    parts = [attend_ring(spec, ring, chunk, settings)]
    if sinks:
        chunk_rows = new_rows(spec, chunk, numbers, settings)
        first, key_positions = write_sinks(ring, chunk, chunk_rows, numbers, sinks)
        query_positions = chunk.positions
        if settings.cache_relative:
            rank = jnp.arange(sinks, dtype=jnp.uint32)
            key_positions = jnp.broadcast_to(rank, key_positions.shape)
            query_positions = cache_relative_positions(ring, numbers, num_sampled)
        visible = jnp.arange(sinks)[None, None, :] <= numbers[:, :, None]
        bias = masked_bias(spec, visible, query_positions, key_positions, kv_heads)
        q = spec.encoding.rotate(chunk.q, query_positions)
        parts.append(slot_attention(q, first.k, first.v, bias, spec.scale, spec.softcap))
    hidden = numbers < sinks if sinks else None
    parts.append(local_attention(spec, chunk, settings.window, hidden, ring.k))
    return merge(*parts)


def key_sets(
    spec: Spec, ring: Ring, chunk: Chunk, settings: RingSettings, num_sampled: NumSampled
) -> list[KeySet]:
    """What `attend` reads, for the kernel `flash_attention`: the parts of sinks that are in the
    ring and in the chunk are sets of their own."""
    sinks, numbers = settings.sinks, token_numbers(ring, chunk.valid)
    k, v = new_rows(spec, chunk, numbers, settings)
    q = spec.encoding.rotate(chunk.q, chunk.positions)
    count = jnp.minimum(ring.count, ring.k.shape[2])[:, None]
    end = jnp.where(chunk.valid, count, 0)
    is_sink = chunk.valid & (numbers < sinks) if sinks else jnp.zeros_like(chunk.valid)
    in_ring = KeySet(q, ring.k, ring.v, end, first=sinks)
    sets = [
        within(in_ring, chunk.positions, ring.positions, settings.window),
        chunk_keys(chunk, q, k, v, chunk.valid & ~is_sink, settings.window),
    ]
    if sinks:
        if settings.cache_relative:
            q = spec.encoding.rotate(chunk.q, cache_relative_positions(ring, numbers, num_sampled))
        new = chunk_keys(chunk, q, k, v, is_sink)
        sets.append(KeySet(q, ring.k, ring.v, jnp.minimum(end, sinks)))
        # Once all sinks are in the ring, no block of the chunk is read for them.
        sets.append(replace(new, end=jnp.where(ring.count[:, None] < sinks, new.end, 0)))
    return sets


def attend_ring(spec: Spec, ring: Ring, chunk: Chunk, settings: RingSettings) -> Partial:
    """Attention to the ring as it was before the chunk, without the sinks."""
    q = spec.encoding.rotate(chunk.q, chunk.positions)
    size, kv_heads = ring.positions.shape[1], ring.k.shape[1]

    def ring_bias(start: Array | int, size: int) -> Array:
        positions = jax.lax.dynamic_slice_in_dim(ring.positions, start, size, 1)
        slot = start + jnp.arange(size)[None, :]
        # The sinks are masked and not sliced off: slicing would copy the ring.
        visible = (slot >= settings.sinks) & (slot < ring.count[:, None])
        visible = visible[:, None] & chunk.valid[:, :, None]
        if settings.window is not None:
            distance = (chunk.positions[:, :, None] - positions[:, None, :]).astype(jnp.int32)
            visible &= distance < settings.window
        return masked_bias(spec, visible, chunk.positions, positions, kv_heads)

    # A mask of moderate size is computed once for all layers, a larger one block by block.
    elements = jax.eval_shape(lambda: ring_bias(0, size)).size
    bias = ring_bias(0, size) if elements <= _WHOLE_MASK else ring_bias
    return slot_attention(q, ring.k, ring.v, bias, spec.scale, spec.softcap)


def sink_rows(ring: Ring, sinks: int) -> ExactSinks:
    """The sinks, in full precision if they are stored so."""
    if ring.exact_sinks is not None:
        return ring.exact_sinks
    return ExactSinks(rows.cut(ring.k, 0, sinks), rows.cut(ring.v, 0, sinks))


def write_sinks(
    ring: Ring,
    chunk: Chunk,
    chunk_rows: tuple[Array, Array],
    numbers: Int32[Array, "B T"],
    sinks: int,
) -> tuple[ExactSinks, UInt32[Array, "B P"]]:
    """The sinks and their positions in the text after this chunk; chunk_rows: its `new_rows`."""
    is_sink = numbers[:, None, :] == jnp.arange(sinks)[None, :, None]  # [B,P,T]
    mask, source = jnp.any(is_sink, axis=2), jnp.argmax(is_sink, axis=2)

    def write_rows(cache: Array, new: Array) -> Array:
        new = jnp.take_along_axis(new, source[:, None, :, None], axis=2)
        return jnp.where(mask[:, None, :, None], new.astype(cache.dtype), cache)

    positions = jnp.take_along_axis(chunk.positions, source, axis=1)
    positions = jnp.where(mask, positions, ring.positions[:, :sinks])
    return ExactSinks(*map(write_rows, sink_rows(ring, sinks), chunk_rows)), positions


def decode(
    spec: Spec,
    ring: Ring,
    chunk: Chunk,
    settings: RingSettings,
    num_sampled: NumSampled = 0,
    beside: Sequence[KeySet] = (),
) -> tuple[Partial, Ring]:
    """Attention of one token, and the ring with it. Read this before `attend`.

    beside: keys that `flash_attention` reads with those of the ring, where it reads them.

    The token is written first, so a window as large as the ring needs no distance mask. The query
    has another position for the sinks: their logits are computed again and replace those of their
    slots. Then one softmax covers sinks and ring.
    """
    sinks, cache_relative = settings.sinks, settings.cache_relative
    numbers = token_numbers(ring, chunk.valid)
    ring = write(spec, ring, chunk, settings)
    if xla_gpu.reads_by_flash(spec, chunk.q, ring.k):
        sets = _key_sets_of_token(spec, ring, chunk, settings, numbers, num_sampled)
        return Partial(*flash_attention([*sets, *beside], spec.scale, spec.softcap)), ring
    if beside:
        raise ValueError("keys beside the ring are read where xla_gpu.reads_by_flash says so only")
    size, kv_heads = ring.positions.shape[1], ring.k.shape[1]
    slot = jnp.arange(size)[None, :]
    visible = (slot < ring.count[:, None]) & chunk.valid
    if settings.window is not None and settings.window < size - sinks:
        distance = (chunk.positions - ring.positions).astype(jnp.int32)
        visible &= (distance < settings.window) | (slot < sinks)
    q, query_positions = spec.encoding.rotate(chunk.q, chunk.positions), chunk.positions
    bias = masked_bias(spec, visible[:, None], query_positions, ring.positions, kv_heads)
    if not sinks or (ring.exact_sinks is None and not cache_relative):
        return slot_attention(q, ring.k, ring.v, bias, spec.scale, spec.softcap), ring
    logits = scores(q, ring.k, spec.scale, spec.softcap) + bias
    first, sink_positions = sink_rows(ring, sinks), ring.positions[:, :sinks]
    if cache_relative:
        # The query is rotated a second time, for the sinks; slicing off the ring would copy it.
        query_positions = cache_relative_positions(ring, numbers, num_sampled)
        sink_positions = jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.uint32), sink_positions.shape)
        q = spec.encoding.rotate(chunk.q, query_positions)
    bias = masked_bias(spec, visible[:, None, :sinks], query_positions, sink_positions, kv_heads)
    sink_scores = scores(q, first.k, spec.scale, spec.softcap) + bias
    exact = ring.exact_sinks is not None  # then a part of their own; their slots are masked
    slot_scores = jnp.full_like(sink_scores, -jnp.inf) if exact else sink_scores
    logits = jax.lax.dynamic_update_slice(logits, slot_scores, (0, 0, 0, 0, 0))
    partial = blend(logits, ring.v)
    return merge(partial, blend(sink_scores, first.v)) if exact else partial, ring


def _key_sets_of_token(
    spec: Spec,
    ring: Ring,
    chunk: Chunk,
    settings: RingSettings,
    numbers: Int32[Array, "B 1"],
    num_sampled: NumSampled,
) -> list[KeySet]:
    """What one token, which is in the ring already, reads of sinks and ring."""
    sinks, size = settings.sinks, ring.k.shape[2]
    end = jnp.where(chunk.valid, jnp.minimum(ring.count, size)[:, None], 0)
    q = spec.encoding.rotate(chunk.q, chunk.positions)
    window = settings.window
    window = window if window is not None and window < size - sinks else None
    in_ring = KeySet(q, ring.k, ring.v, end, first=sinks)
    sets = [within(in_ring, chunk.positions, ring.positions, window)]
    if sinks:
        if settings.cache_relative:
            q = spec.encoding.rotate(chunk.q, cache_relative_positions(ring, numbers, num_sampled))
        sets.append(KeySet(q, ring.k, ring.v, jnp.minimum(end, sinks)))
    return sets


def cached(ring: Ring) -> Cached:
    """The stored positions, the same for every KV head."""
    batch, kv_heads, size = ring.k.shape[:3]
    filled = jnp.arange(size)[None, :] < ring.count[:, None]
    weight = jnp.where(filled, np.float32(0), -jnp.inf)
    shape = (batch, kv_heads, size)
    return Cached(
        jnp.broadcast_to(ring.positions[:, None], shape),
        jnp.broadcast_to(weight[:, None], shape),
    )
