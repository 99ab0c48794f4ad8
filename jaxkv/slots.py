"""The state that `full`, `window` and `streaming` share: protected first slots, then a ring.

Token number n of a row goes to slot n while there is room, then round and round the slots behind
the protected ones. Keys are stored turned to the position they are seen at for ever; nothing is
re-rotated. `count` [B] is the number of tokens absorbed, folded by `_advance` so that it never
overflows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.attention import blend, local_attention, merge, scores, slot_attention
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.typing import Array, Bool, Float, Int32, UInt32


class Slots(NamedTuple):
    """S slots a row: turned keys, values, the position each holds, and the tokens absorbed."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    positions: UInt32[Array, "B S"]
    count: Int32[Array, " B"]


AXES = Slots(("B", "K", "S", "H"), ("B", "K", "S", "H"), ("B", "S"), ("B",))
# These follow from positions and valid alone: the same in every layer with this policy.
SHARED = ("positions", "count")
APPENDS = ("k", "v", "positions")
_WHOLE_MASK = 2**24  # elements of a mask that may stand in memory at once: 64 MiB
# The count of a row without a ring that was given more tokens than it had slots.
OVERFULL = 2**31 - 1


def check(sinks: int, window: int, positions: str) -> None:
    """Raise UserError for settings of sinks and a ring that cannot be."""
    if window < 1:
        raise UserError(f"window must be at least 1, got {window}; give 1 or more")
    if sinks < 0:
        raise UserError(f"sinks must be 0 or more, got {sinks}; try sinks=4")
    if positions not in ("cache", "absolute"):
        raise UserError(f"positions must be cache or absolute, got {positions!r}")


def init(spec: Spec, rows: int, slots: int) -> Slots:
    """Slots that hold nothing yet."""
    shape, dtype = (rows, spec.kv_heads, slots, spec.head_dim), jnp.dtype(spec.dtype)
    return Slots(
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        positions=jnp.zeros((rows, slots), jnp.uint32),
        count=jnp.zeros((rows,), jnp.int32),
    )


def grow(slots: Slots, size: int) -> Slots:
    """The same tokens with room for more."""
    more = size - slots.positions.shape[1]
    return Slots(
        k=jnp.pad(slots.k, ((0, 0), (0, 0), (0, more), (0, 0))),
        v=jnp.pad(slots.v, ((0, 0), (0, 0), (0, more), (0, 0))),
        positions=jnp.pad(slots.positions, ((0, 0), (0, more))),
        count=slots.count,
    )


def _advance(count: Array, new: Array, sinks: int, size: int, ring: bool) -> Array:
    """count + new; exact up to `size`, beyond that folded to name the same slot of the ring.

    Without a ring it becomes OVERFULL, which no later growth undoes.
    """
    # A row that is overfull already stays so: its count is beyond every size.
    total = jnp.minimum(count, OVERFULL - new) + new
    beyond = size + (total - size) % (size - sinks) if ring else OVERFULL
    return jnp.where(total <= size, total, beyond)


def number(slots: Slots, valid: Bool[Array, "B T"]) -> Int32[Array, "B T"]:
    """Each token's number in its row, from 0 (folded like count); -1 for padding."""
    ordinal = slots.count[:, None] + jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1
    return jnp.where(valid, ordinal, -1)


def turn_keys(
    spec: Spec, chunk: Chunk, numbers: Int32[Array, "B T"], sinks: int, by_rank: bool
) -> Float[Array, "B T K H"]:
    """The chunk's keys at the positions they are stored at: sinks by rank, others where they stand.

    A sink's rank in the cache never changes, so the query is turned to its own rank to meet it.
    """
    positions = chunk.positions
    if sinks and by_rank:
        positions = jnp.where(numbers < sinks, numbers.astype(jnp.uint32), positions)
    return spec.encoding.rotate(chunk.k, positions)


def extend(
    spec: Spec, slots: Slots, chunk: Chunk, sinks: int, by_rank: bool = True, ring: bool = True
) -> Slots:
    """Absorb a chunk of any length; of tokens that meet in one slot the newest stays.

    ring: tokens beyond the last slot go round; without it they are lost and `count` says so.
    """
    tokens, size = chunk.valid.shape[1], slots.positions.shape[1]
    if tokens == 1:
        return _extend_one(spec, slots, chunk, sinks, by_rank, ring)
    numbers = number(slots, chunk.valid)
    new = jnp.sum(chunk.valid, axis=1, dtype=jnp.int32)
    # Valid tokens first, in order: the n-th new token then stands at place n.
    places = jnp.argsort(~chunk.valid, axis=1, stable=True)
    keys, values = turn_keys(spec, chunk, numbers, sinks, by_rank), chunk.v

    def write(into: Slots, start: Int32[Array, " B"], width: int) -> Slots:
        """What lands in the slots start .. start+width-1 of each row."""
        slot = start[:, None] + jnp.arange(width)[None, :]
        last = (slots.count + new - 1)[:, None]
        # Of all numbers that land in a ring slot, the largest.
        newest = last - (last - slot) % (size - sinks)
        lands = jnp.where(slot < sinks, slot, newest) if ring else slot
        offset = lands - slots.count[:, None]
        hit = (offset >= 0) & (lands <= last) & (lands >= jnp.minimum(slot, sinks))
        source = jnp.take_along_axis(places, jnp.where(hit, offset, 0), axis=1)

        def put(old: Array, fresh: Array) -> Array:  # [B,K,S,H], [B,T,K,H]
            taken = jnp.take_along_axis(fresh, source[:, :, None, None], axis=1)
            return _put(old, taken.transpose(0, 2, 1, 3), start, hit)

        positions = jnp.take_along_axis(chunk.positions, source, axis=1)
        return into._replace(
            k=put(into.k, keys),
            v=put(into.v, values),
            positions=_put(into.positions, positions, start, hit),
        )

    if tokens >= min(size // 2, size - sinks):
        out = write(slots, jnp.zeros_like(slots.count), size)
    else:  # only where something lands: behind the newest, and where the ring begins anew
        out = write(slots, jnp.minimum(next_slot(slots, sinks), size - tokens), tokens)
        if ring:
            out = write(out, jnp.full_like(slots.count, sinks), tokens)
    return out._replace(count=_advance(slots.count, new, sinks, size, ring))


def next_slot(slots: Slots, sinks: int) -> Int32[Array, " B"]:
    size = slots.positions.shape[1]
    beyond = sinks + (slots.count - sinks) % (size - sinks)
    return jnp.where(slots.count < size, slots.count, beyond)


def _put(old: Array, fresh: Array, start: Int32[Array, " B"], hit: Bool[Array, "B W"]) -> Array:
    """old [B,K,S,H] or [B,S] with fresh ([B,K,W,H], [B,W]) from slot `start` on, where hit."""
    axis, width = 0 if old.ndim == 2 else 1, hit.shape[1]
    hit = hit if old.ndim == 2 else hit[:, None, :, None]
    if width == old.shape[axis + 1]:
        return jnp.where(hit, fresh.astype(old.dtype), old)

    def one(old_row: Array, fresh_row: Array, at: Array, hit_row: Array) -> Array:
        held = jax.lax.dynamic_slice_in_dim(old_row, at, width, axis)
        fresh_row = jnp.where(hit_row, fresh_row.astype(old.dtype), held)
        return jax.lax.dynamic_update_slice_in_dim(old_row, fresh_row, at, axis)

    # One row is written as [K,S,H]: a 4-D write would be fused twice, and the cache copied.
    if old.shape[0] == 1:
        return one(old[0], fresh[0], start[0], hit[0])[None]
    return jax.vmap(one)(old, fresh, start, hit)


def _extend_one(
    spec: Spec, slots: Slots, chunk: Chunk, sinks: int, by_rank: bool, ring: bool
) -> Slots:
    """Absorb one token: no place to look for, no two that meet in a slot."""
    size, slot = slots.positions.shape[1], next_slot(slots, sinks)
    kept = chunk.valid if ring else chunk.valid & (slots.count < size)[:, None]
    keys = turn_keys(spec, chunk, number(slots, chunk.valid), sinks, by_rank)
    new = chunk.valid[:, 0].astype(jnp.int32)
    return Slots(
        k=_put(slots.k, keys.transpose(0, 2, 1, 3), slot, kept),
        v=_put(slots.v, chunk.v.transpose(0, 2, 1, 3), slot, kept),
        positions=_put(slots.positions, chunk.positions, slot, kept),
        count=_advance(slots.count, new, sinks, size, ring),
    )


def view_by_rank(
    slots: Slots, numbers: Int32[Array, "B T"], between: Int32[Array, "#B #T"] | int = 0
) -> UInt32[Array, "B T"]:
    """The rank of each query among the kept; between: how many of them are behind the sinks and
    before the ring."""
    last = slots.positions.shape[1] - 1
    return (jnp.clip(numbers, 0, last) + between).astype(jnp.uint32)


def attend(
    spec: Spec,
    slots: Slots,
    chunk: Chunk,
    sinks: int,
    window: int | None,
    by_rank: bool = True,
    between: Int32[Array, "#B #T"] | int = 0,
) -> Partial:
    """The sinks (those of this chunk too), the ring as it was before, and the chunk itself."""
    numbers = number(slots, chunk.valid)
    kv_heads = slots.k.shape[1]
    parts = [attend_ring(spec, slots, chunk, sinks, window)]
    if sinks:
        first = Slots(slots.k[:, :, :sinks], slots.v[:, :, :sinks], slots.positions[:, :sinks],
                      slots.count)  # fmt: skip
        first = extend_first(spec, first, chunk, numbers, by_rank)
        view = view_by_rank(slots, numbers, between) if by_rank else chunk.positions
        rank = jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.uint32), first.positions.shape)
        seen = jnp.arange(sinks)[None, None, :] <= numbers[:, :, None]
        bias = _bias(spec, seen, view, rank if by_rank else first.positions, kv_heads)
        turned = spec.encoding.rotate(chunk.q, view)
        parts.append(slot_attention(turned, first.k, first.v, bias, spec.scale, spec.softcap))
    hidden = _first_sinks(numbers, sinks) if sinks else None
    parts.append(local_attention(spec, chunk, window, hidden))
    return merge(*parts)


def attend_ring(spec: Spec, slots: Slots, chunk: Chunk, sinks: int, window: int | None) -> Partial:
    """The ring as it was before the chunk, without sinks and without the chunk's own tokens."""
    q = spec.encoding.rotate(chunk.q, chunk.positions)
    size, kv_heads = slots.positions.shape[1], slots.k.shape[1]

    def ring_bias(start: Array | int, size: int) -> Array:
        ring = jax.lax.dynamic_slice_in_dim(slots.positions, start, size, 1)
        slot = start + jnp.arange(size)[None, :]
        # The sinks are masked here, for slicing them off would copy the ring.
        seen = ((slot >= sinks) & (slot < slots.count[:, None]))[:, None] & chunk.valid[:, :, None]
        if window is not None:
            seen &= (chunk.positions[:, :, None] - ring[:, None, :]).astype(jnp.int32) < window
        return _bias(spec, seen, chunk.positions, ring, kv_heads)

    # A mask of moderate size is made once for all layers, a larger one block by block.
    wide = jax.eval_shape(lambda: ring_bias(0, size)).size
    bias = ring_bias(0, size) if wide <= _WHOLE_MASK else ring_bias
    return slot_attention(q, slots.k, slots.v, bias, spec.scale, spec.softcap)


def _first_sinks(numbers: Int32[Array, "B T"], sinks: int) -> Bool[Array, "B T"]:
    """The tokens that become sinks, with the padding before and between them.

    They come first, so it takes one place a row to say which: XLA:CPU would otherwise put the sum
    behind `numbers`, with all its arithmetic of places, into every element of a mask.
    """
    others = jnp.where(numbers < sinks, numbers.shape[1], jnp.arange(numbers.shape[1])[None])
    return jnp.arange(numbers.shape[1])[None] < jnp.min(others, axis=1, keepdims=True)


def extend_first(
    spec: Spec, first: Slots, chunk: Chunk, numbers: Int32[Array, "B T"], by_rank: bool
) -> Slots:
    """The protected slots alone after this chunk."""
    sinks = first.positions.shape[1]
    hits = numbers[:, None, :] == jnp.arange(sinks)[None, :, None]  # [B,S,T]
    hit, source = jnp.any(hits, axis=2), jnp.argmax(hits, axis=2)

    def put(old: Array, fresh: Array) -> Array:
        taken = jnp.take_along_axis(fresh, source[:, :, None, None], axis=1)
        return jnp.where(hit[:, None, :, None], taken.transpose(0, 2, 1, 3).astype(old.dtype), old)

    positions = jnp.take_along_axis(chunk.positions, source, axis=1)
    return first._replace(
        k=put(first.k, turn_keys(spec, chunk, numbers, sinks, by_rank)),
        v=put(first.v, chunk.v),
        positions=jnp.where(hit, positions, first.positions),
    )


def decode(
    spec: Spec,
    slots: Slots,
    chunk: Chunk,
    sinks: int,
    by_rank: bool = True,
    ring: bool = True,
    between: Int32[Array, "#B #T"] | int = 0,
) -> tuple[Partial, Slots]:
    """One token: written first, then every held slot is in view, so no mask by distance."""
    numbers = number(slots, chunk.valid)
    slots = _extend_one(spec, slots, chunk, sinks, by_rank, ring)
    size, kv_heads = slots.positions.shape[1], slots.k.shape[1]
    seen = (jnp.arange(size)[None, :] < slots.count[:, None]) & chunk.valid
    q = spec.encoding.rotate(chunk.q, chunk.positions)
    bias = _bias(spec, seen[:, None], chunk.positions, slots.positions, kv_heads)
    logits = scores(q, slots.k, spec.scale, spec.softcap) + bias
    if sinks and by_rank:
        # Only the sinks are met from another position; slicing off the ring would copy it.
        view = view_by_rank(slots, numbers, between)
        rank = jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.uint32), (view.shape[0], sinks))
        bias = _bias(spec, seen[:, None, :sinks], view, rank, kv_heads)
        turned = spec.encoding.rotate(chunk.q, view)
        first = scores(turned, slots.k[:, :, :sinks], spec.scale, spec.softcap) + bias
        logits = jax.lax.dynamic_update_slice(logits, first, (0, 0, 0, 0, 0))
    return blend(logits, slots.v), slots


def _bias(
    spec: Spec,
    seen: Bool[Array, "B T S"],
    queries: UInt32[Array, "B T"],
    keys: UInt32[Array, "B S"],
    kv_heads: int,
) -> Array:
    bias = jnp.where(seen, np.float32(0), -jnp.inf)[:, None, None]
    penalty = spec.encoding.bias(queries, keys, kv_heads)
    return bias if penalty is None else bias + penalty


def kept(slots: Slots) -> Kept:
    """The positions held, the same for every kv head."""
    rows, kv_heads, size = slots.k.shape[:3]
    held = jnp.arange(size)[None, :] < slots.count[:, None]
    weight = jnp.where(held, np.float32(0), -jnp.inf)
    shape = (rows, kv_heads, size)
    return Kept(
        jnp.broadcast_to(slots.positions[:, None], shape),
        jnp.broadcast_to(weight[:, None], shape),
    )
