"""Sampled attention on an NVIDIA GPU in Mosaic. No GPU has run it yet.

One kernel multiplies sampled keys with the query, XLA computes the softmax, and a second kernel
sums sampled values. So XLA computes `settings.weight_fn`, and a log weight may use any operation.
In both kernels, each sampled slot is copied to shared memory by itself; the slots of the next block
are copied during the computation of this one. A sample is split among programs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxkv.pallas_kernels import mosaic
from jaxkv.pallas_kernels.mosaic import plgpu
from jaxkv.pallas_kernels.online_softmax import AttentionOutput, accumulate, empty_sums, normalize
from jaxkv.pallas_kernels.sampled_attention.reference import (
    Angles,
    Array,
    LogitSettings,
    Weight,
    cache_index,
    flatten_heads,
    in_sample,
    logits,
    pad_sample,
)

BLOCK = 64  # slots in shared memory at a time, and as many on their way
PROGRAMS = 512  # aimed at per sequence: a few per multiprocessor of a large GPU
LINE = 128  # bytes: a slot must be a multiple, so that copies are aligned
MAX_HEAD_DIM = 256  # limited by the size of a copy
SCRATCH = 8192  # bytes of shared memory for the sum over the warps of a program


def supports(k: Array) -> bool:
    """Whether the kernels support this cache [B,K,S,H], and this jax has Mosaic GPU."""
    head_dim = k.shape[3]
    fits = head_dim <= MAX_HEAD_DIM and head_dim * k.dtype.itemsize % LINE == 0
    return mosaic.is_available() and fits and k.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


class KernelSample(NamedTuple):
    """slots [heads,M], count [heads], and among how many programs each sample is split."""

    slots: Array
    count: Array
    parts: int
    interpret: object


class Visit(NamedTuple):
    """The work of a program on an operand of all heads, which writes its result to a reference.

    start(operand, head): the first carry. rows(carry, operand, out, (head, block), slots): the
    next, given the slots [BLOCK,H] of a block in float32. finish(carry, out, head, part).
    """

    start: Callable
    rows: Callable
    finish: Callable


def attend(
    settings: LogitSettings,
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    count: Array,
    weight: Weight,
    interpret: object = None,
) -> AttentionOutput:
    """`reference.attend`."""
    slots = pad_sample(slots, BLOCK)
    if isinstance(weight, Angles):
        norms = weight.norms[cache_index(slots, k.shape[1])]
        weight = Angles(norms, weight.shift[..., None], weight.length[..., None])
    elif weight is not None:
        weight = pad_sample(weight, BLOCK)
    # Independent of the batch, so that other sequences do not change how a sample is split.
    parts = min(pl.cdiv(PROGRAMS, q.shape[1]), slots.shape[-1] // BLOCK)
    sample = KernelSample(flatten_heads(slots), flatten_heads(count), parts, interpret)
    product = _products(flatten_heads(q), flatten_heads(k), sample).reshape(slots.shape)
    # The product of a slot outside the sample may be anything.
    within = in_sample(slots, count)
    sample_logits = jnp.where(within, logits(settings, product, weight), -jnp.inf)

    def apply(share: Array) -> Array:
        sums = _weighted(flatten_heads(share), flatten_heads(v), sample)
        return jnp.sum(sums, axis=1).reshape(q.shape)

    out, lse = normalize(accumulate(empty_sums(q.shape), sample_logits, apply))
    return AttentionOutput(out, lse[..., 0])


def _products(q: Array, k: Array, sample: KernelSample) -> Array:
    """q.k [heads,M] of q [heads,H] and sampled slots of k [caches,S,H]; undefined after count."""
    layout = _layout(k.dtype)

    def start(q_ref, head: Array) -> Array:
        return plgpu.load(q_ref.at[head], layout=layout.reduce(0), optimized=False)

    def rows(q: Array, _, out_ref, at: tuple, slots: Array) -> Array:
        products = slots * jax.lax.broadcast_in_dim(q, slots.shape, (1,))
        plgpu.store(out_ref.at[at], jnp.sum(products, axis=1), optimized=False)
        return q

    out = jax.ShapeDtypeStruct(sample.slots.shape, jnp.float32)
    visit = Visit(start, rows, finish=lambda *_: None)
    return _over_sample(visit, k, sample, q.astype(jnp.float32), out)


def _weighted(share: Array, v: Array, sample: KernelSample) -> Array:
    """The sums [heads,parts,H] of share [heads,M] times sampled slots of v [caches,S,H]."""
    layout, head_dim = _layout(v.dtype), v.shape[2]

    def start(*_) -> Array:
        return plgpu.layout_cast(jnp.zeros((BLOCK, head_dim), jnp.float32), layout)

    def rows(sums: Array, share_ref, _, at: tuple, slots: Array) -> Array:
        share = plgpu.load(share_ref.at[at], layout=layout.reduce(1), optimized=False)
        return sums + slots * jax.lax.broadcast_in_dim(share, slots.shape, (0,))

    def finish(sums: Array, out_ref, *at: Array) -> None:
        plgpu.store(out_ref.at[at], jnp.sum(sums, axis=0), optimized=False)

    shape = sample.slots.shape[0], sample.parts, head_dim
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _over_sample(Visit(start, rows, finish), v, sample, share, out)


def _over_sample(
    visit: Visit, cache: Array, sample: KernelSample, operand: Array, out: jax.ShapeDtypeStruct
) -> Array:
    """Run one program per head and part over the sampled slots of a cache [caches,S,H]."""
    heads, head_dim = sample.slots.shape[0], cache.shape[2]
    # A tile of one slot leaves it as it is. By default, tiles would be swizzled.
    in_rows = (plgpu.TilingTransform((1, head_dim)),)
    return plgpu.kernel(
        partial(_visit_part, visit=visit, group=heads // cache.shape[0], parts=sample.parts),
        out_type=out,
        grid=(heads, sample.parts),
        grid_names=("head", "part"),
        scratch_types=[
            plgpu.SMEM((2, BLOCK, head_dim), cache.dtype, transforms=in_rows),
            plgpu.Barrier(num_arrivals=BLOCK, num_barriers=2),
        ],
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=SCRATCH),
        interpret=sample.interpret,
    )(cache, sample.slots, sample.count, operand)


def _visit_part(
    cache_ref,
    slots_ref,
    count_ref,
    operand_ref,
    out_ref,
    buffer,
    arrived,
    *,
    visit: Visit,
    group: int,
    parts: int,
) -> None:
    head, part = jax.lax.axis_index("head"), jax.lax.axis_index("part")
    cache = jax.lax.div(head, np.int32(group))
    # Blocks alternate between parts, so that all parts have equal work for any count.
    blocks = pl.cdiv(pl.cdiv(count_ref[head], BLOCK) - part, parts)
    first = lambda i: pl.multiple_of((part + i * parts) * BLOCK, BLOCK)

    def start(i: Array) -> None:
        side = jax.lax.rem(i, np.int32(2))

        def copy(j: Array, _: None) -> None:
            slot = pl.ds(slots_ref[head, first(i) + j], 1)
            target = buffer.at[side, pl.ds(j, 1)]
            plgpu.copy_gmem_to_smem(cache_ref.at[cache, slot], target, arrived.at[side])

        jax.lax.fori_loop(0, BLOCK, copy, None)

    def visit_block(i: Array, carry: Array) -> Array:
        side = jax.lax.rem(i, np.int32(2))
        pl.when(i + 1 < blocks)(lambda: start(i + 1))
        plgpu.barrier_wait(arrived.at[side])
        slots = plgpu.load(buffer.at[side], layout=_layout(buffer.dtype), optimized=False)
        at = head, pl.ds(first(i), BLOCK)
        return visit.rows(carry, operand_ref, out_ref, at, slots.astype(jnp.float32))

    pl.when(blocks > 0)(lambda: start(np.int32(0)))
    carry = jax.lax.fori_loop(0, blocks, visit_block, visit.start(operand_ref, head))
    visit.finish(carry, out_ref, head, part)


def _layout(dtype: jnp.dtype) -> plgpu.Layout:
    """Registers of slots: a row of threads loads LINE bytes, from different banks of memory."""
    return mosaic.row_layout(LINE // (mosaic.VECTOR * dtype.itemsize))
