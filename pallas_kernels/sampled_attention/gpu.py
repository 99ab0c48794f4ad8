"""Sampled attention on an NVIDIA GPU in Triton.

A sample is split among programs, which load slots by an array of indices; their sums are merged.
Triton supports every GPU from capability 8.0 on. jax 0.12 deprecates it. Once it is removed,
`supports` returns False and `dense` is chosen.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxkv.pallas_kernels.merge_parts import merge_parts
from jaxkv.pallas_kernels.online_softmax import (
    AttentionOutput,
    Sums,
    accumulate,
    empty_sums,
    normalize,
)
from jaxkv.pallas_kernels.sampled_attention.reference import (
    Angles,
    Array,
    LogitSettings,
    Weight,
    flatten_heads,
    logits,
    pad_sample,
)

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # deprecated since jax 0.12
    plgpu = None

BLOCK = 32  # slots in the registers of a program at a time
PROGRAMS = 512  # aimed at per sequence: a few per multiprocessor of a large GPU
WARPS = 4


def supports(k: Array) -> bool:
    """Whether the kernel supports this cache [B,K,S,H], and this jax has Triton."""
    head_dim = k.shape[3]
    power = 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0
    return plgpu is not None and power and k.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


def attend(
    settings: LogitSettings,
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    count: Array,
    weight: Weight,
    interpret: bool = False,
) -> AttentionOutput:
    """`reference.attend`."""
    batch, heads, head_dim = q.shape
    kv_heads, num_slots = k.shape[1:3]
    group, all_heads = heads // kv_heads, batch * heads
    slots = flatten_heads(pad_sample(slots, BLOCK))
    # Independent of the batch, so that other sequences do not change how a sample is split.
    # A power of two, as the merge needs.
    blocks = pl.next_power_of_2(slots.shape[-1] // BLOCK + 1) // 2
    parts = min(pl.next_power_of_2(pl.cdiv(PROGRAMS, heads)), blocks)
    number = pl.BlockSpec((None, 1), lambda i, _: (i, 0))
    of_head = lambda width: pl.BlockSpec((None, width), lambda i, _: (i, 0))
    of_group = lambda *shape: pl.BlockSpec(
        (None, *shape), lambda i, _: (i // group, *(0 for _ in shape))
    )
    column = lambda a: flatten_heads(a)[:, None]
    args = [column(count), slots, flatten_heads(q)]
    specs = [number, of_head(slots.shape[-1]), of_head(head_dim)]
    if isinstance(weight, Angles):
        args += [flatten_heads(weight.norms), column(weight.shift), column(weight.length)]
        specs += [of_group(num_slots), number, number]
    elif weight is not None:
        args += [flatten_heads(pad_sample(weight, BLOCK))]
        specs += [of_head(slots.shape[-1])]
    out, lse = pl.pallas_call(
        partial(_attend_part, settings=settings, parts=parts),
        grid=(all_heads, parts),
        in_specs=[*specs, of_group(num_slots, head_dim), of_group(num_slots, head_dim)],
        out_specs=[
            pl.BlockSpec((None, None, head_dim), lambda i, part: (part, i, 0)),
            pl.BlockSpec((None, 1), lambda i, part: (part, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((parts, all_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((parts, all_heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
    )(*args, flatten_heads(k), flatten_heads(v))
    if parts == 1:
        out, lse = out[0], lse[0]
    else:
        rows = lambda a: a[:, None, None]
        out, lse = merge_parts(rows(out), rows(lse), 1, jnp.dtype(jnp.float32), interpret)
    return AttentionOutput(out.reshape(q.shape), lse.reshape(q.shape[:2]))


def _attend_part(count_ref, slots_ref, q_ref, *refs, settings: LogitSettings, parts: int) -> None:
    *weight, k_ref, v_ref, out_ref, lse_ref = refs
    part, count = pl.program_id(1), count_ref[0]
    q = q_ref[...].astype(jnp.float32)

    def attend_block(i: Array, so_far: Sums) -> Sums:
        # Blocks alternate between parts, so that all parts have equal work for any count.
        first = (part + i * parts) * BLOCK
        block = pl.ds(first, BLOCK)
        slots = slots_ref[block]
        keys, values = (ref[slots, :].astype(jnp.float32) for ref in (k_ref, v_ref))
        product = jnp.sum(keys * jnp.broadcast_to(q[None, :], keys.shape), axis=1)
        match weight:
            case [norms_ref, shift_ref, length_ref]:
                block_weight = Angles(norms_ref[slots], shift_ref[0], length_ref[0])
            case [log_weight_ref]:
                block_weight = log_weight_ref[block]
            case _:
                block_weight = None
        block_logits = logits(settings, product, block_weight)
        within = first + jax.lax.broadcasted_iota(jnp.int32, block_logits.shape, 0) < count
        block_logits = jnp.where(within, block_logits, np.float32(-np.inf))
        wide = lambda p: jnp.broadcast_to(p[:, None], values.shape)
        return accumulate(so_far, block_logits, lambda p: jnp.sum(wide(p) * values, axis=0))

    blocks = pl.cdiv(pl.cdiv(count, BLOCK) - part, parts)
    sums = jax.lax.fori_loop(0, blocks, attend_block, empty_sums(q.shape))
    out_ref[...], lse_ref[...] = normalize(sums)
