"""Hash tables that a compiled step can read: keys by their codes, in blocks of one size.

In each of L tables the keys of one code are adjacent, padded to whole blocks of W entries. A query
reads the blocks of its code in every table and counts in how many tables it finds each key. The
cost is proportional to the keys found, plus one or two bytes per cached key for the counts of one
query head; on a GPU plus several arrays of four bytes per cached key and query head. An entry is
the key's place plus one; 0 is no key.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Leaf
from jaxkv.pallas_kernels import host_memory
from jaxkv.platform import cpu as xla_cpu
from jaxkv.typing import Array, Bool, Float32, Int32, Integer, UInt32

MAX_FOUND = 65535  # places of a sample: with more, ranks overflow 32 bits
_WIDEST = 16  # entries of a block: 64 bytes, one cache line
_BLOCKS = 512  # blocks read at a time
COMPARED = 128  # codes of the tail compared at a time
_SELECTED = 1024  # places of a sample selected at a time
WORD = 32  # places per word of bits


class Tables(NamedTuple):
    """entries: E blocks per table. first: the first block of each code, C = 2^bits + 1."""

    entries: Integer[Array, "B K L E W"]
    first: Int32[Array, "B K L C"]


LEAVES = Tables(Leaf("B K L E W"), Leaf("B K L C"))


def init(batch: int, kv_heads: int) -> Tables:
    """Empty tables."""
    return Tables(
        jnp.zeros((batch, kv_heads, 0, 0, 0), jnp.int32),
        jnp.zeros((batch, kv_heads, 0, 0), jnp.int32),
    )


def width(keys: int, bits: int) -> int:
    """W: at most a quarter of the mean bucket, so that half-empty blocks cost little; 1 to 16."""
    mean = max(1, keys >> bits)
    return max(1, min(_WIDEST, 1 << max(0, mean.bit_length() - 3)))


def blocks(keys: int, bits: int) -> int:
    """E: enough blocks for this many keys, however their codes are distributed."""
    wide = width(keys, bits)
    return (keys + min(keys, 1 << bits) * (wide - 1)) // wide


def entry_type(keys: int) -> np.dtype:
    """The smallest integer type that counts this many keys."""
    return np.dtype(np.uint16 if keys < 2**16 else np.int32)


def nbytes(keys: int, bits: int, tables: int) -> int:
    """Bytes of the tables of one sequence and KV head."""
    table = blocks(keys, bits) * width(keys, bits) * entry_type(keys).itemsize
    return tables * (table + 4 * ((1 << bits) + 1))


def build(codes: Int32[Array, "L S"], valid: Bool[Array, " S"], bits: int) -> Tables:
    """Tables of one sequence and KV head over the valid keys."""
    tables, keys = codes.shape
    wide, num_blocks = width(keys, bits), blocks(keys, bits)
    codes = jnp.where(valid[None], codes, np.int32(1 << bits))
    ordered, keys_in_order = xla_cpu.sort_codes(codes, bits)
    edge = jnp.arange((1 << bits) + 1, dtype=jnp.int32)
    begin = jax.vmap(lambda row: jnp.searchsorted(row, edge).astype(jnp.int32))(ordered)
    filled = -(-jnp.diff(begin, axis=1) // np.int32(wide))
    first = jnp.pad(jnp.cumsum(filled, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))

    def fill(ordered: Array, keys_in_order: Array, begin: Array, first: Array) -> Array:
        rank = jnp.arange(keys, dtype=jnp.int32) - begin[ordered]
        place = jnp.where(ordered < 1 << bits, first[ordered] * wide + rank, num_blocks * wide)
        empty = jnp.zeros(num_blocks * wide, entry_type(keys))
        entry = (keys_in_order + 1).astype(empty.dtype)
        return empty.at[place].set(entry, mode="drop")

    def fill_table(args: tuple) -> Array:
        return fill(*args)

    entries = jax.lax.map(fill_table, (ordered, keys_in_order, begin, first))
    return Tables(entries.reshape(tables, num_blocks, wide), first)


def tally(
    tables: Tables,
    kv_head: Int32[Array, ""],
    code: Int32[Array, " L"],
    places: int,
) -> UInt32[Array, " W"]:
    """The places that are in the bucket of `code` in two tables or more, one bit each.

    kv_head: the number of sequence and KV head. 32 places per word, the first in its lowest bit.
    """
    count, num_blocks, wide = tables.entries.shape[2:]
    # Gathers from the whole: slicing out one KV head would copy its tables.
    entries = tables.entries.reshape(-1, wide)
    first = tables.first.reshape(-1)
    table = kv_head * count + jnp.arange(count, dtype=jnp.int32)
    bucket = table * tables.first.shape[3] + code
    begin, end = (host_memory.take(first, bucket + i) for i in (0, 1))
    upto = jnp.cumsum(end - begin)
    # The j-th block of all buckets is block j + base of its table.
    base = table * num_blocks + begin - (upto - (end - begin))
    total = upto[-1]
    # Several counts per word; words that make one word of bits are apart, so that many are packed
    # side by side: XLA:CPU packs single bytes slowly (record workarounds, row tally). This layout
    # is that of the whole count, so it is not in platform/cpu.py.
    bits = 8 if count < 2**8 else 16
    fields, words = np.uint32(WORD // bits), np.uint32(-(-places // WORD))

    def add_blocks(i: Array, counts: Array) -> Array:
        j = i * _BLOCKS + jnp.arange(_BLOCKS, dtype=jnp.int32)
        mine = jnp.searchsorted(upto, j, side="right").astype(jnp.int32)
        mine = base.at[jnp.minimum(mine, count - 1)].get(mode="promise_in_bounds")
        block = jnp.where(j < total, j + mine, 0)
        entry = host_memory.take(entries, block).astype(jnp.uint32)
        entry = jnp.where((j < total)[:, None], entry, 0)
        place = jnp.maximum(entry, 1) - 1
        increment = jnp.minimum(entry, 1) << (place % fields * bits)
        at = place % WORD // fields * words + place // WORD
        return counts.at[at].add(increment, mode="promise_in_bounds")

    counts = jnp.zeros(WORD // fields * words, jnp.uint32)
    counts = jax.lax.fori_loop(0, -(-total // _BLOCKS), add_blocks, counts)
    enough = _at_least_two(counts.reshape(-1, words), bits)
    place = np.arange(0, WORD, fields, dtype=np.uint32)[:, None]
    return jnp.sum(enough << place, axis=0, dtype=jnp.uint32)


def _at_least_two(counts: UInt32[Array, "..."], bits: int) -> UInt32[Array, "..."]:
    """Which counts of a word are at least two: one bit each, the lowest bits."""
    ones = sum(1 << at for at in range(0, WORD, bits))
    high, low = np.uint32(ones << bits - 1), np.uint32(~(ones << bits - 1) & 0xFFFFFFFF)
    rest = counts & ~np.uint32(ones)
    enough = (((rest & low) + low | rest) & high) >> np.uint32(bits - 1)
    # The product gathers one bit of each field in its highest bits.
    fields = WORD // bits
    gather = sum(1 << WORD - fields + i - i * bits for i in range(fields))
    return enough * np.uint32(gather) >> np.uint32(WORD - fields)


def compare(
    tail: Integer[Array, "B K L Z"],
    kv_head: Array,
    code: Int32[Array, " L"],
    last: Array,
) -> UInt32[Array, " W"]:
    """The places of the unindexed tail, up to `last`, that agree in two codes or more."""
    tail = tail.reshape(-1, *tail.shape[2:])
    tables, size = tail.shape[1:]
    width = min(COMPARED, size)

    def compare_block(i: Array, matches: Array) -> Array:
        first = jnp.minimum(i * width, size - width)
        codes = jax.lax.dynamic_slice(tail, (kv_head, 0, first), (1, tables, width))[0]
        num_equal = jnp.sum(codes == code.astype(codes.dtype)[:, None], axis=0, dtype=jnp.int32)
        enough = (num_equal >= 2) & (first + jnp.arange(width) <= last)
        return jax.lax.dynamic_update_slice(matches, enough, (first,))

    matches = jax.lax.fori_loop(0, (last + width) // width, compare_block, jnp.zeros(size, bool))
    matches = jnp.pad(matches, (0, -size % WORD)).reshape(-1, WORD)
    place = np.uint32(1) << np.arange(WORD, dtype=np.uint32)
    return jnp.sum(jnp.where(matches, place, np.uint32(0)), axis=1, dtype=jnp.uint32)


class SampledPlaces(NamedTuple):
    """places: sampled places; the first `count` are valid. total: how many there were to sample."""

    places: Int32[Array, "... M"]
    count: Int32[Array, "..."]
    total: Int32[Array, "..."]


def select(words: UInt32[Array, " W"], max_places: int, draw: Float32[Array, ""]) -> SampledPlaces:
    """The places whose bits are set: all of them, or a systematic sample of `max_places`.

    draw: in [0, 1). If there are `total` > `max_places`, each is drawn with probability
    max_places / total, at equal distances from one random start.
    """
    ones = jax.lax.population_count(words).astype(jnp.int32)
    upto = jnp.cumsum(ones)
    total = upto[-1]
    count = jnp.minimum(total, max_places)
    width = min(_SELECTED, max_places)
    size = -(-max_places // width) * width
    # How many words end by each slot, counted at the slot where they end.
    ends = jnp.zeros(size + 1, jnp.int32).at[jnp.minimum(upto, size)].add(1)

    def select_block(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        places, before = so_far
        first = i * width
        slot = first + jnp.arange(width, dtype=jnp.int32)

        def take_all() -> tuple[Array, Array]:
            return before + jnp.cumsum(jax.lax.dynamic_slice(ends, (first,), (width,))), slot

        def draw_sample() -> tuple[Array, Array]:
            rank = _systematic(slot.astype(jnp.uint32), total, max_places, draw)
            return jnp.searchsorted(upto, rank, side="right").astype(jnp.int32), rank

        word, rank = jax.lax.cond(total > max_places, draw_sample, take_all)
        before, word = word[-1], jnp.minimum(word, words.shape[0] - 1)
        at = lambda a: a.at[word].get(mode="promise_in_bounds")
        place = word * WORD + _nth_bit(at(words), rank - (at(upto) - at(ones)))
        return jax.lax.dynamic_update_slice(places, place, (first,)), before

    nothing = jnp.zeros(size, jnp.int32), jnp.zeros((), jnp.int32)
    places, _ = jax.lax.fori_loop(0, -(-count // width), select_block, nothing)
    return SampledPlaces(places[:max_places], count, total)


def select_at_once(
    matching: Bool[Array, "B N P"], max_places: int, draw: Float32[Array, "B N"]
) -> SampledPlaces:
    """`select` for all query heads in a few kernels, without a loop; matching: a bool per place."""
    batch, heads, places = matching.shape
    cumulative = jnp.cumsum(matching, axis=2, dtype=jnp.int32)
    total = cumulative[:, :, -1]
    sequence, head, place = jnp.ogrid[:batch, :heads, :places]
    rank = jnp.where(matching, cumulative - 1, places)
    place = jnp.broadcast_to(place.astype(jnp.int32), rank.shape)
    # XLA:GPU computes these zeros in the kernel of `rank`, and copies constant ones in every step.
    zeros = jnp.minimum(cumulative, 0)
    matches = zeros.at[sequence, head, rank].set(place, mode="drop", unique_indices=True)
    slot = jnp.arange(max_places, dtype=jnp.uint32)[None, None]
    drawn = _systematic(slot, total[:, :, None], max_places, draw[:, :, None])
    # Ranks of samples that have all matches are the slots.
    drawn = jnp.take_along_axis(matches, jnp.minimum(drawn, places - 1), axis=2)
    all_fit = (total <= max_places)[:, :, None]
    sampled = jnp.where(all_fit, matches[:, :, :max_places], drawn)
    return SampledPlaces(sampled, jnp.minimum(total, max_places), total)


def _systematic(slot: Array, total: Array, max_places: int, draw: Array) -> Int32[Array, "..."]:
    """floor((slot x total + begin) / max_places), begin from 0 to total - 1, in 32 bits."""
    total, size = total.astype(jnp.uint32), np.uint32(max_places)
    begin = jnp.minimum((draw * total.astype(jnp.float32)).astype(jnp.uint32), total - 1)
    rank = slot * (total // size) + begin // size
    return (rank + (slot * (total % size) + begin % size) // size).astype(jnp.int32)


def _nth_bit(word: UInt32[Array, " M"], n: Int32[Array, " M"]) -> Int32[Array, " M"]:
    """The place of the n-th set bit of a word, from 0."""
    place = jnp.zeros_like(n)
    for half in (16, 8, 4, 2, 1):
        low = word & np.uint32((1 << half) - 1)
        ones = jax.lax.population_count(low).astype(jnp.int32)
        higher = n >= ones
        n = jnp.where(higher, n - ones, n)
        word = jnp.where(higher, word >> np.uint32(half), low)
        place = place + jnp.where(higher, np.int32(half), 0)
    return place
