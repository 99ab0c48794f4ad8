"""Bucket counts on an NVIDIA GPU in Triton. No GPU has run it yet; it is compiled for an H100.

One program per table and query head reads the bucket of the query's code, however long it is, and
adds to the counts in device memory by atomic additions. So no bound on a bucket is needed, and the
host decides nothing. Additions of integers give the same counts in any order.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from jaxkv.pallas_kernels import triton

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # deprecated since jax 0.12
    plgpu = None

BLOCK = 128  # entries in the registers of a program at a time
WARPS = 1


def is_supported() -> bool:
    """Whether this jax has Triton, and every GPU of this process can run it."""
    return plgpu is not None and triton.is_supported()


def count(
    entries: Array, first: Array, codes: Array, places: int, interpret: bool = False
) -> Array:
    """`bucket_counts`."""
    batch, kv_heads, tables, blocks, width = entries.shape
    heads = codes.shape[1]
    group, size, bounds = heads // kv_heads, blocks * width, first.shape[3]
    flat = lambda a, *shape: a.reshape(-1, tables, *shape)
    of_kv_head = lambda size: pl.BlockSpec((None, None, size), lambda i, l: (i // group, l, 0))
    row = places + BLOCK
    of_query = pl.BlockSpec((None, row), lambda i, l: (i, 0))
    # XLA:GPU computes these zeros. Constant ones it would read, and copy in every step.
    zeros = jnp.minimum(flat(codes)[:, :1], 0)
    counts = pl.pallas_call(
        partial(_count_table, width=width, masked=not interpret),
        grid=(batch * heads, tables),
        in_specs=[
            of_kv_head(size),
            of_kv_head(bounds),
            pl.BlockSpec((None, 1), lambda i, l: (i, l)),
            of_query,
        ],
        out_specs=of_query,
        out_shape=jax.ShapeDtypeStruct((batch * heads, row), jnp.int32),
        input_output_aliases={3: 0},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS),
        interpret=interpret,
    )(
        flat(entries, size),
        flat(first, bounds),
        flat(codes),
        jnp.broadcast_to(zeros, (batch * heads, row)),
    )
    return counts[:, :places].reshape(batch, heads, places)


def _count_table(
    entries_ref, first_ref, code_ref, _, counts_ref, *, width: int, masked: bool
) -> None:
    """masked: additions have a mask, which the interpreter lacks. There, entries that are not in
    the bucket add 0 beyond the places."""
    code, size, places = code_ref[0], entries_ref.shape[0], counts_ref.shape[0] - BLOCK
    begin, end = first_ref[code] * width, first_ref[code + 1] * width
    lane = jax.lax.broadcasted_iota(jnp.int32, (BLOCK,), 0)

    def count_block(i: Array, nothing: None) -> None:
        at = begin + i * BLOCK + lane
        entry = entries_ref[jnp.minimum(at, size - 1)].astype(jnp.int32)
        inside = (at < end) & (entry > 0)
        place = jnp.where(inside, entry - 1, places + lane)
        mask = inside if masked else None
        plgpu.atomic_add(counts_ref, (place,), inside.astype(jnp.int32), mask=mask)
        return nothing

    jax.lax.fori_loop(0, pl.cdiv(end - begin, np.int32(BLOCK)), count_block, None)
