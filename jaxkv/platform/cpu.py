"""Workarounds for XLA:CPU. Each says what XLA does without it, and where that was measured.

Each function computes what its plain form computes. Other platforms compile the plain form, except
where the docstring says that the form is the same everywhere. Rows are those of the record
`workarounds`, made by evals/benchmarks/cpu_forms.py; docs/decisions/compilation.md has its table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.rows import Int8Rows, Rows
from jaxkv.contract import Chunk, Partial
from jaxkv.typing import Array, Float, Float32, Int8, Int32

CACHED_LOGITS = 2**20  # of all heads, 4 MiB; attention writes two arrays of them
FEW_ROWS = 16  # of the left side of a product with a cache in int8


def attend_by_head(
    attend: Callable[..., Partial],
    q: Array,
    k: Rows,
    v: Rows,
    bias: Array | None,
    start: Array | int,
    *,
    size: int,
) -> Partial:
    """`attend(q, k, v, bias, start, size=size)`; on a CPU one KV head after another if it is large.

    XLA:CPU otherwise writes the logits of all heads of a long chunk, which exceed the processor's
    cache, before it reads them. Those of one head fit. Few logits also keep the temporary arrays of
    a layer below 32 MiB. Above that the C library takes new pages for each call, which made a layer
    of width 256 twice as slow.
    Record workarounds, row attend_by_head.
    """
    together = partial(attend, size=size)
    if q.shape[0] * q.shape[1] * q.shape[2] * size <= CACHED_LOGITS:
        return together(q, k, v, bias, start)
    by_head = partial(_attend_by_head, attend, size=size)
    return jax.lax.platform_dependent(q, k, v, bias, start, cpu=by_head, default=together)


def _attend_by_head(attend, q, k, v, bias, start, *, size) -> Partial:
    batch, queries, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    split = q.reshape(batch, queries, kv_heads, group, -1).transpose(0, 2, 1, 3, 4)

    def attend_head(at: Array) -> Partial:
        sequence, head = at // kv_heads, at % kv_heads

        def pick(a: Array, first: Array | int = 0, count: int | None = None) -> Array:
            """One sequence and KV head of [#B,#K,X,...], and `count` of X from `first` on."""
            index = (sequence if a.shape[0] > 1 else 0, head if a.shape[1] > 1 else 0)
            sizes = (1, 1, a.shape[2] if count is None else count, *a.shape[3:])
            return jax.lax.dynamic_slice(a, (*index, first, *[0] * (a.ndim - 3)), sizes)

        head_bias = None if bias is None else pick(bias)
        keys, values = jax.tree.map(lambda leaf: pick(leaf, start, size), (k, v))
        return attend(pick(split)[0], keys, values, head_bias, 0, size=size)

    out, lse = jax.lax.map(attend_head, jnp.arange(batch * kv_heads))  # [B*K,1,T,G,H]
    out = out.reshape(batch, kv_heads, queries, group, -1).transpose(0, 2, 1, 3, 4)
    lse = lse.reshape(batch, kv_heads, queries, group).transpose(0, 2, 1, 3)
    return Partial(out.reshape(batch, queries, heads, -1), lse.reshape(batch, queries, heads))


def flat_rows(rows: Rows) -> tuple[Array, Float32[Array, "BK 1 S"] | None]:
    """Rows [B,K,S,H] as [B*K,S,H], and the scales of those in int8; the same on all platforms.

    For products with B and K as two axes, XLA:CPU copies a cache whole in each step of a loop.
    Record workarounds, row flat_rows.
    Scales are converted to float32 by a shift of their bits. XLA:CPU fuses a plain conversion with
    the write of a slot, which then happens twice, and copies all scales of a layer four times in
    each step. A test on the compiled text guards it.
    """
    flat = lambda leaf: leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:])  # noqa: E731
    if not isinstance(rows, Int8Rows):
        return flat(rows), None
    bits = jax.lax.bitcast_convert_type(flat(rows.scale), jnp.uint16).astype(jnp.uint32)
    scale = jax.lax.bitcast_convert_type(bits << np.uint32(16), jnp.float32)
    return flat(rows.values), scale.transpose(0, 2, 1)


def product_with_int8(
    dot: Callable[..., Array],
    a: Float[Array, "X M I"],
    b: Int8[Array, "X S H"],
    contract: tuple[int, int],
) -> Float32[Array, "X M O"]:
    """`dot(a, b, contract)`, where b is converted to the dtype of a.

    A dot product of XLA:CPU needs a float copy of b. So for few rows of `a`, as in decoding,
    products are added up without one, which reads b as it is. The gain is memory: the copy of one
    layer. With jax 0.7.2 the sums take two to four times as long, so versions before 0.12 convert
    b. There, each step copies a cache in int8.
    Record workarounds, row product_with_int8.
    """

    def add_up(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if contract == (2, 2):
            return jnp.sum(a[:, :, None] * b[:, None], axis=3)
        return jnp.sum(a[..., None] * b[:, None], axis=2)

    def convert(a: Array, b: Array) -> Array:
        return dot(a, b.astype(a.dtype), contract)

    if a.shape[1] > FEW_ROWS or jax.__version_info__ < (0, 12):
        return convert(a, b)
    return jax.lax.platform_dependent(a, b, cpu=add_up, default=convert)


def argmax(logits: Float32[Array, "B V"]) -> tuple[Int32[Array, " B"], Float32[Array, " B"]]:
    """The first index of the maximum of each sequence, and the maximum; the same on all platforms.

    A sequence with a NaN has the maximum NaN and the last index.
    An argmax is one reduction of pairs of a number and an index. Two reductions of single numbers
    are faster in XLA:CPU.
    Record workarounds, row argmax.
    """
    # Without the barrier the logits may be recomputed with other bits, which equal no maximum.
    logits = jax.lax.optimization_barrier(logits)
    best, last = jnp.max(logits, axis=-1), logits.shape[-1] - 1
    place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.min(jnp.where(logits == best[:, None], place, last), axis=-1), best


def order_after(chunk: Chunk, *read: Rows) -> Chunk:
    """The same chunk, made to depend on arrays that were read from a cache, on all platforms.

    The oldest token of a ring must be read before the chunk overwrites it. XLA:CPU drops
    optimization barriers, and without a dependency it copies the whole ring. So the chunk passes
    through a condition on the arrays that is always true, which XLA does not know. A test on the
    compiled text guards it.
    Record workarounds, rows order_after-reservoir, -balance-stream and -magicpig.
    """
    always = jnp.ones(chunk.valid.shape[0], bool)
    for leaf in jax.tree.leaves(read):
        first = leaf.reshape(leaf.shape[0], -1)[:, 0].astype(jnp.float32)
        sign = jax.lax.bitcast_convert_type(first, jnp.uint32) >> np.uint32(31)
        always &= sign <= np.uint32(1)
    always = always[:, None, None, None]
    return chunk._replace(k=jnp.where(always, chunk.k, 0), v=jnp.where(always, chunk.v, 0))


def map_sequences(function: Callable[..., Array], *arrays: Array) -> Array:
    """`jax.vmap(function)(*arrays)`; a batch of one has no batch axis inside, on all platforms.

    With a batch axis XLA:CPU fuses the write of a slot twice and copies the whole cache. A test on
    the compiled text guards it.
    Record workarounds, rows map_sequences and map_sequences-magicpig.
    """
    if arrays[0].shape[0] == 1:
        return function(*(array[0] for array in arrays))[None]
    return jax.vmap(function)(*arrays)


def cumsum(counts: Int32[Array, " S"]) -> Int32[Array, " S"]:
    """`jnp.cumsum(counts)` for sums below 2^24, by two products, on all platforms.

    A running sum is a window sum in XLA, which XLA:CPU computes slowly.
    Record workarounds, row cumsum.
    """
    size = counts.shape[0]
    wide = max(1, int(np.sqrt(size)))
    table = jnp.pad(counts, (0, -size % wide)).reshape(-1, wide).astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST  # integers below 2^24
    within = jnp.dot(table, np.triu(np.ones((wide, wide), np.float32)), precision=exact)
    before = np.tril(np.ones((table.shape[0],) * 2, np.float32), -1)
    before = jnp.dot(before, within[:, -1:], precision=exact)
    return (within + before).reshape(-1)[:size].astype(jnp.int32)


def sort_codes(
    codes: Int32[Array, "L S"], bits: int
) -> tuple[Int32[Array, "L S"], Int32[Array, "L S"]]:
    """Codes up to 2^bits in order, and the keys that have them, lower places first.

    The same on all platforms. XLA:CPU sorts one word faster than a pair of code and place.
    Record workarounds, row sort.
    """
    keys = codes.shape[1]
    place = jnp.broadcast_to(jnp.arange(keys, dtype=jnp.int32), codes.shape)
    shift = (keys - 1).bit_length()
    if shift + bits + 1 > 32:
        return tuple(jax.lax.sort((codes, place), dimension=1, num_keys=1, is_stable=True))
    word = codes.astype(jnp.uint32) << np.uint32(shift) | place.astype(jnp.uint32)
    word = jnp.sort(word, axis=1)
    keys_in_order = word & np.uint32((1 << shift) - 1)
    return (word >> np.uint32(shift)).astype(jnp.int32), keys_in_order.astype(jnp.int32)
