"""Sampled attention on an NVIDIA GPU, by Triton. Never run on a GPU yet.

A sample is split among programs, which load rows by an array of indices; their sums are merged. Of
the two languages that Pallas has for these GPUs, Triton loads scattered rows and suits every one
from capability 8.0 on. jax 0.12 calls it deprecated: once it is gone `takes` says no and what is
taken is `dense`, until there is a kernel in Mosaic GPU, which on Hopper would copy each row to
shared memory by itself, as tpu.py does.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxkv.pallas_kernels.sampled_attention.reference import (
    Angles,
    Array,
    Attended,
    How,
    Sums,
    Weight,
    absorb,
    by_head,
    finish,
    logits,
    nothing,
    pad,
)

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # jax 0.12 says that it will go one day
    plgpu = None

BLOCK = 32  # rows that a program holds in registers at a time
PROGRAMS = 512  # wanted at least: a few for each of the processors that a large GPU has
WARPS = 4


def takes(k: Array) -> bool:
    """Whether the kernel takes this cache [B,K,S,H], and this jax has Triton."""
    head_dim = k.shape[3]
    power = 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0
    return plgpu is not None and power and k.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


def attend(
    how: How, q: Array, k: Array, v: Array, rows: Array, count: Array, weight: Weight,
    interpret: bool = False,
) -> Attended:  # fmt: skip
    """`reference.attend`."""
    batch, heads, head_dim = q.shape
    kv_heads, slots = k.shape[1:3]
    group, every = heads // kv_heads, batch * heads
    rows = by_head(pad(rows, BLOCK))
    parts = min(pl.cdiv(PROGRAMS, every), rows.shape[-1] // BLOCK)
    number = pl.BlockSpec((None, 1), lambda i, _: (i, 0))
    of_head = lambda width: pl.BlockSpec((None, width), lambda i, _: (i, 0))  # noqa: E731
    of_group = lambda *shape: pl.BlockSpec(  # noqa: E731
        (None, *shape), lambda i, _: (i // group, *(0 for _ in shape))
    )
    column = lambda a: by_head(a)[:, None]  # noqa: E731
    given = [column(count), rows, by_head(q)]
    specs = [number, of_head(rows.shape[-1]), of_head(head_dim)]
    if isinstance(weight, Angles):
        given += [by_head(weight.norms), column(weight.shift), column(weight.length)]
        specs += [of_group(slots), number, number]
    elif weight is not None:
        given += [by_head(pad(weight, BLOCK))]
        specs += [of_head(rows.shape[-1])]
    out, lse = pl.pallas_call(
        partial(_attend_part, how=how, parts=parts),
        grid=(every, parts),
        in_specs=[*specs, of_group(slots, head_dim), of_group(slots, head_dim)],
        out_specs=[
            pl.BlockSpec((None, None, head_dim), lambda i, part: (i, part, 0)),
            pl.BlockSpec((None, None, 1), lambda i, part: (i, part, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((every, parts, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((every, parts, 1), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
    )(*given, by_head(k), by_head(v))
    out, lse = _merge(out, lse)
    return Attended(out.reshape(q.shape), lse.reshape(q.shape[:2]))


def _merge(out: Array, lse: Array) -> tuple[Array, Array]:
    """Of out [heads,parts,H] and lse [heads,parts,1]."""
    top = jnp.max(lse, axis=1, keepdims=True)
    share = jnp.exp(lse - jnp.where(top == -jnp.inf, np.float32(0), top))
    return finish(Sums(top[:, 0], jnp.sum(share, axis=1), jnp.sum(share * out, axis=1)))


def _attend_part(count_ref, rows_ref, q_ref, *refs, how: How, parts: int) -> None:
    *weight, k_ref, v_ref, out_ref, lse_ref = refs
    part, count = pl.program_id(1), count_ref[0]
    q = q_ref[...].astype(jnp.float32)

    def attend_block(i: Array, so_far: Sums) -> Sums:
        # Parts take turns, so that all have as much to do whatever the count.
        first = (part + i * parts) * BLOCK
        here = pl.ds(first, BLOCK)
        rows = rows_ref[here]
        keys, values = (ref[rows, :].astype(jnp.float32) for ref in (k_ref, v_ref))
        product = jnp.sum(keys * jnp.broadcast_to(q[None, :], keys.shape), axis=1)
        match weight:
            case [norms_ref, shift_ref, length_ref]:
                given = Angles(norms_ref[rows], shift_ref[0], length_ref[0])
            case [log_weight_ref]:
                given = log_weight_ref[here]
            case _:
                given = None
        found = logits(how, product, given)
        there = first + jax.lax.broadcasted_iota(jnp.int32, found.shape, 0) < count
        found = jnp.where(there, found, np.float32(-np.inf))
        wide = lambda p: jnp.broadcast_to(p[:, None], values.shape)  # noqa: E731
        return absorb(so_far, found, lambda p: jnp.sum(wide(p) * values, axis=0))

    blocks = pl.cdiv(pl.cdiv(count, BLOCK) - part, parts)
    sums = jax.lax.fori_loop(0, blocks, attend_block, nothing(q.shape))
    out_ref[...], lse_ref[...] = finish(sums)
