"""Workarounds for XLA:CPU. Each says what XLA does without it, and where that was measured.

Each function computes what its plain form computes. Other platforms compile the plain form, except
where the docstring says that the form is the same everywhere. Rows are those of the record
`workarounds`, made by evals/benchmarks/cpu_forms.py; docs/decisions/compilation.md has its table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Chunk, Partial, State
from jaxkv.rows import Int8Rows, Rows
from jaxkv.typing import Array, Bool, Float, Float32, Int8, Int32

CACHED_LOGITS = 2**20  # of all heads, 4 MiB; attention writes two arrays of them
WIDENED = 2**20  # integers of a quantised matrix that are converted to floats at a time
FEW_ROWS = 16  # of the left side of a product with a cache in int8
FEW_TOKENS = 16  # of all sequences, in a product with a weight
PART_SLOTS = 512  # of a cache, whose products with values are summed at once
PARTS, LARGE = 8, 2**18  # of the product of one token with a weight of at least LARGE elements


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
    Measured in evals/results/workarounds.json, row attend_by_head.
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


def attend_filled(
    attend: Callable[..., Partial], q: Float[Array, "B 1 N H"], k: Rows, v: Rows, bias: Array | None
) -> Partial:
    """`attend(q, k, v, bias, 0, size=S)`; on a CPU without most of the slots that no query sees.

    A cache that grows may have slots for a text many times as long, as in a server. XLA:CPU
    otherwise reads them all for every token. Of the sizes PART_SLOTS, twice that, four times that
    and so on, it reads the first that has all that is seen; a size that is not that of the cache is
    copied. `sum_of_parts` gives each the same bits. With jax 0.7.2 it does not where S is no
    multiple of PART_SLOTS, so versions before 0.12 read all slots of such a cache.
    Measured in evals/results/workarounds.json, row attend_filled.
    """
    slots = k.shape[2]
    uneven = slots % PART_SLOTS != 0 and jax.__version_info__ < (0, 12)
    if bias is None or bias.shape[-1] != slots or slots <= PART_SLOTS or uneven:
        return attend(q, k, v, bias, 0, size=slots)
    filled = partial(_attend_filled, attend)
    together = lambda q, k, v, bias: attend(q, k, v, bias, 0, size=slots)
    return jax.lax.platform_dependent(q, k, v, bias, cpu=filled, default=together)


def _attend_filled(attend, q, k, v, bias) -> Partial:
    heads, slots = k.shape[:2], k.shape[2]
    sizes = [PART_SLOTS]
    while 2 * sizes[-1] < slots:
        sizes.append(2 * sizes[-1])

    def over(size: int) -> Callable[..., Partial]:
        def attend_first(q: Array, flat: tuple[Rows, Rows], bias: Array) -> Partial:
            cut = lambda leaf: leaf[:, :size].reshape(*heads, size, *leaf.shape[2:])
            return attend(q, *jax.tree.map(cut, flat), bias[..., :size], 0, size=size)

        return attend_first

    seen = jnp.any(bias > -jnp.inf, axis=(0, 1, 2, 3))
    last = jnp.max(jnp.where(seen, jnp.arange(1, slots + 1), 0))
    # As 4-D arrays the branches would get copies of them.
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (k, v))
    branches = [over(size) for size in (*sizes, slots)]
    return jax.lax.switch(jnp.sum(last > np.array(sizes)), branches, q, flat, bias)


def sum_of_parts(
    product: Callable[[Array, Array], Array], weights: Float[Array, "X M S"], v: Array
) -> Float32[Array, "X M H"]:
    """`product(weights, v)`; on a CPU as a sum of products of PART_SLOTS slots.

    The order in which XLA:CPU adds up depends on the number of slots. So the bits of a token would
    depend on empty slots, and on the texts beside it.
    """
    batch, rows, slots = weights.shape
    if slots <= PART_SLOTS:
        return product(weights, v)
    parts = slots // PART_SLOTS
    end = parts * PART_SLOTS

    def add_up(weights: Array, v: Array) -> Array:
        split = weights[:, :, :end].reshape(batch, rows, parts, PART_SLOTS).transpose(0, 2, 1, 3)
        of_parts = product(
            split.reshape(batch * parts, rows, PART_SLOTS),
            v[:, :end].reshape(batch * parts, PART_SLOTS, -1),
        )
        total = jnp.sum(of_parts.reshape(batch, parts, rows, -1), axis=1)
        return total if end == slots else total + product(weights[:, :, end:], v[:, end:])

    return jax.lax.platform_dependent(weights, v, cpu=add_up, default=product)


def flat_rows(rows: Rows) -> tuple[Array, Float32[Array, "BK 1 S"] | None]:
    """Rows [B,K,S,H] as [B*K,S,H], and the scales of those in int8; the same on all platforms.

    For products with B and K as two axes, XLA:CPU copies a cache whole in each step of a loop.
    Measured in evals/results/workarounds.json, row flat_rows.
    Scales are converted to float32 by a shift of their bits. XLA:CPU fuses a plain conversion with
    the write of a slot, which then happens twice, and copies all scales of a layer four times in
    each step. A test on the compiled text guards it.
    """
    flat = lambda leaf: leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:])
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
    products are added up without one, which reads b as it is. The gain is memory, the copy of one
    layer, and that no step copies a cache in int8; tests on the compiled program guard both. With
    jax 0.7.2 the sums take two to four times as long, so versions before 0.12 convert b.
    Measured in evals/results/workarounds.json, row product_with_int8.
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


def flatten_heads(states: Sequence[State], sharded: bool) -> tuple[State, ...]:
    """The states for a loop to carry: B and K of large leaves merged; the same on all platforms.

    XLA:CPU copies a cache whole if a loop carries it as 4-D or 5-D. sharded: over a mesh batch and
    KV heads are split separately, so they stay apart.
    Measured in evals/results/workarounds.json, row flatten_heads.
    """

    def flatten(leaf: Array) -> Array:
        batch, *rest = leaf.shape
        return leaf if leaf.ndim < 4 else leaf.reshape(batch * rest[0], *rest[1:])

    return tuple(states) if sharded else jax.tree.map(flatten, tuple(states))


def restore_heads(states: Sequence[State], like: Sequence[State]) -> tuple[State, ...]:
    """The inverse of `flatten_heads`; like: states of the same shapes."""
    return jax.tree.map(lambda array, old: array.reshape(old.shape), tuple(states), tuple(like))


def argmax(logits: Float32[Array, "B V"]) -> tuple[Int32[Array, " B"], Float32[Array, " B"]]:
    """The first index of the maximum of each sequence, and the maximum; the same on all platforms.

    A sequence with a NaN has the maximum NaN and the last index.
    An argmax is one reduction of pairs of a number and an index. Two reductions of single numbers
    are faster in XLA:CPU.
    Measured in evals/results/workarounds.json, row argmax.
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
    Measured in evals/results/workarounds.json, rows order_after-reservoir, -balance-stream and
    -magicpig.
    """
    always = always_after(*jax.tree.leaves(read))[:, None, None, None]
    return chunk._replace(k=jnp.where(always, chunk.k, 0), v=jnp.where(always, chunk.v, 0))


def always_after(*read: Array) -> Bool[Array, " B"]:
    """True for every sequence, which XLA does not know, because it depends on arrays [B,...]."""
    always = jnp.ones(read[0].shape[0], bool)
    for leaf in read:
        first = leaf.reshape(leaf.shape[0], -1)[:, 0].astype(jnp.float32)
        sign = jax.lax.bitcast_convert_type(first, jnp.uint32) >> np.uint32(31)
        always &= sign <= np.uint32(1)
    return always


def map_sequences(function: Callable[..., Array], *arrays: Array) -> Array:
    """`jax.vmap(function)(*arrays)`; a batch of one has no batch axis inside, on all platforms.

    With a batch axis XLA:CPU fuses the write of a slot twice and copies the whole cache. A test on
    the compiled text guards it.
    Measured in evals/results/workarounds.json, rows map_sequences and map_sequences-magicpig.
    """
    if arrays[0].shape[0] == 1:
        return function(*(array[0] for array in arrays))[None]
    return jax.vmap(function)(*arrays)


def sort_codes(
    codes: Int32[Array, "L S"], bits: int
) -> tuple[Int32[Array, "L S"], Int32[Array, "L S"]]:
    """Codes up to 2^bits in order, and the keys that have them, lower places first.

    The same on all platforms. XLA:CPU sorts one word faster than a pair of code and place.
    Measured in evals/results/workarounds.json, row sort.
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


def decode_compiler_options() -> dict[str, object]:
    """Compiler options of the decode loop: a sequential scheduler on a CPU.

    By default XLA:CPU runs independent operations at the same time, so their temporary arrays are
    in memory together, such as the rotated keys and the values of a sample. The gain is memory; the
    time of SmolLM2-135M does not change.
    Measured in evals/results/workarounds.json, row decode_compiler_options.
    """
    if jax.default_backend() != "cpu":
        return {}
    if jax.__version_info__ >= (0, 10):
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return {"xla_cpu_enable_concurrency_optimized_scheduler": False}


def linear(
    x: Float[Array, "B T I"], weight: Float[Array, "O I"], dtype: Any
) -> Float[Array, "B T O"]:
    """x @ weight.T; on a CPU few tokens in float32 have other forms of this product.

    On all platforms tokens have one axis in the product: with two, its gradient is transposed,
    which takes XLA:CPU longer than the product. The gradient of two MLPs took 1.8 times as long.
    Measured with jax 0.12 on two cores, without a record, as are the times of the forms below, for
    the products of SmolLM2-135M.
    """
    tokens = x.reshape(-1, x.shape[2])
    plain = partial(dot, contract=(1, 1), dtype=dtype)
    few = len(tokens) <= FEW_TOKENS and x.dtype == jnp.float32
    if few and len(tokens) > 1:
        form = partial(_weight_first, dtype=dtype)
    elif few and weight.size >= LARGE and weight.shape[0] % PARTS == 0:
        form = partial(_in_parts, dtype=dtype)
    else:
        return plain(tokens, weight).reshape(*x.shape[:2], -1)
    y = jax.lax.platform_dependent(tokens, weight, cpu=form, default=plain)
    return y.reshape(*x.shape[:2], -1)


def _in_parts(
    token: Float[Array, "1 I"], weight: Float[Array, "O I"], dtype: Any
) -> Float[Array, "1 O"]:
    """The product of one token as eight batched products.

    Decoding is limited by memory bandwidth, and XLA:CPU splits a plain product so that some cores
    read less of the weight than others. It takes 1.13 times as long.
    """
    inputs = jnp.broadcast_to(token, (PARTS, token.shape[1]))
    y = jax.lax.dot_general(
        inputs,
        weight.reshape(PARTS, -1, weight.shape[1]),
        (((1,), (2,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )
    return y.reshape(1, -1)


def _weight_first(
    tokens: Float[Array, "X I"], weight: Float[Array, "O I"], dtype: Any
) -> Float[Array, "X O"]:
    """(weight @ tokens.T).T. The barriers keep XLA from folding the transposes into the product.

    A plain product of 2 tokens takes XLA:CPU 1.39 times as long, and one of 8 tokens 1.17 times.
    """
    columns = jax.lax.optimization_barrier(tokens.T)
    return jax.lax.optimization_barrier(dot(weight, columns, (1, 0), dtype)).T


def dot(a: Array, b: Array, contract: tuple[int, int], dtype: Any = None) -> Array:
    """The product over one axis of each; dtype: of the result, by default that of a.

    Backends accumulate products in half precision in float32 and round the result once.
    """
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        # A GPU would write a float32 result to memory before it converts it.
        preferred_element_type=dtype or a.dtype,
    )


def in_loop(integers: Array, x: Float[Array, "B T I"]) -> Array:
    """The integers; on a CPU they depend on x for one token, so a step reads integers.

    XLA:CPU otherwise moves their conversion to floats out of the loop over tokens. Each step then
    reads all weights in float32, and memory holds a float copy of the model. A test checks the
    memory of the compiled loop.
    Measured in evals/results/workarounds.json, row widen.
    """
    if x.shape[1] != 1:
        return integers

    def each_step(integers: Array, x: Array) -> Array:
        first = x.reshape(-1)[0]
        return integers ^ (first != first).astype(integers.dtype)

    plain = lambda integers, x: integers
    return jax.lax.platform_dependent(integers, x, cpu=each_step, default=plain)


def linear_by_blocks(
    x: Float[Array, "B T I"], rows: Any, plain: Callable[[Array, Any], Array], size: int
) -> Array:
    """`plain(x, rows)` of a quantised matrix; on a CPU one token by blocks of rows, in float32.

    XLA:CPU writes the float copy of a whole matrix before the product reads it. That of a block
    stays in the processor's cache, that of a whole output head does not. rows: arrays whose first
    axis is the third of the result. size: integers that are widened.
    Measured in evals/results/workarounds.json, row matmul_widened.
    """
    count, blocks = jax.tree.leaves(rows)[0].shape[0], max(1, size // WIDENED)
    while count % blocks:
        blocks -= 1
    if x.shape[1] != 1 or blocks == 1:
        return plain(x, rows)

    def by_block(x: Array, rows: Any) -> Array:
        split = jax.tree.map(lambda a: a.reshape(blocks, -1, *a.shape[1:]), rows)
        products = jax.lax.map(lambda block: plain(x.astype(jnp.float32), block), split)
        by_row = jnp.moveaxis(products, 0, 2)  # [B,T,blocks,rows,...]
        return by_row.reshape(*x.shape[:2], count, *products.shape[4:])

    return jax.lax.platform_dependent(x, rows, cpu=by_block, default=plain)


# Logits of the training loss in memory at a time: as many as a CPU's cache holds, and more
# elsewhere. Measured in evals/results/workarounds.json, row logits_at_once.
LOGITS_AT_ONCE = {"cpu": 2**21}
LOGITS_AT_ONCE_ELSEWHERE = 2**27


def logits_at_once() -> int:
    """How many logits of the training loss are computed at a time on this backend."""
    return LOGITS_AT_ONCE.get(jax.default_backend(), LOGITS_AT_ONCE_ELSEWHERE)


def query_block() -> int:
    """Queries per block of training attention; small blocks skip more of the causal mask.

    On a CPU the logits of a small block also stay in the processor's cache.
    Measured in evals/results/workarounds.json, row query_block.
    """
    return 128 if jax.default_backend() == "cpu" else 512


def query_block_edges(tokens: int) -> list[int]:
    """The edges of query blocks of equal size, up to one token; the same on all platforms.

    With blocks of 128 and a rest of one query, jax 0.7.2 drops the last block on a CPU and writes
    to wrong addresses. A wrong result, so there is no measurement.
    """
    count = -(-tokens // query_block())
    return [tokens * i // count for i in range(count + 1)]


def map_samples(function: Callable, *arrays: Array) -> tuple[Array, ...]:
    """`function` of every sample: one after another on a CPU, whose cache holds the logits of one.

    Measured in evals/results/workarounds.json, row map_samples.
    """
    if jax.default_backend() == "cpu":
        return jax.lax.map(lambda sample: function(*sample), arrays)
    return jax.vmap(function)(*arrays)
