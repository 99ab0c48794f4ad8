"""Sampled attention on a TPU, one program a query head. Never run on a TPU yet.

The caches stay in HBM and each row of the sample is copied by itself to the chip, those of the next
block while this one is attended to. Float32 is copied row by row; of a type of 16 bits the least
that can be copied is a tile of eight rows, and its other rows get a bias of -inf.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxkv.pallas_kernels.sampled_attention.reference import (
    Angles,
    Array,
    Attended,
    How,
    Sums,
    Weight,
    absorb,
    by_head,
    cosine,
    finish,
    logits,
    nothing,
    pad,
    places,
    there,
)

LANES = 128
BLOCK = 128  # rows that are attended to at a time
UNROLL = 8  # of the loop that starts their copies
MOST = 16_384  # rows of a sample: what a program may hold of scalar memory

# What `dense_is_cheaper` counts with. No TPU has confirmed any of it.
ISSUE = 20e-9  # seconds that the scalar core takes to start a copy: 15e-9 to 30e-9
BANDWIDTH = 819e9  # bytes a second of a v5e
SCATTER = 10e-9  # seconds that XLA takes to scatter one number


def tile(dtype: jnp.dtype) -> int:
    """Rows that are copied for one."""
    return 1 if dtype == jnp.float32 else 8


def takes(k: Array, sample: int) -> bool:
    """Whether the kernel takes samples of so many rows of this cache [B,K,S,H]."""
    slots, head_dim = k.shape[2:]
    kind = k.dtype in (jnp.float32, jnp.bfloat16)
    return kind and head_dim % LANES == 0 and slots % 8 == 0 and sample <= MOST


def dense_is_cheaper(sample: int, group: int, slots: int, head_dim: int, itemsize: int) -> bool:
    """Whether a TPU is expected to attend sooner to all slots than to `sample` rows a query head.

    Copies a kv head: 2 x group x sample, which take the scalar core ISSUE each however short they
    are; dense reads every key and value once for the group. So dense wins at G = 4 and a share of
    2 %, in half precision by far, and rows win at G = 1. The constants are estimates that no TPU
    has confirmed, and `sample` is the room for a sample, of which a draw fills a part.
    """
    row = head_dim * itemsize
    copied = (1 if itemsize == 4 else 8) * row
    rows = 2 * group * sample * max(ISSUE, copied / BANDWIDTH)
    return 2 * slots * row / BANDWIDTH + group * sample * SCATTER < rows


def attend(
    how: How, q: Array, k: Array, v: Array, rows: Array, count: Array, weight: Weight,
    interpret: object = False,
) -> Attended:  # fmt: skip
    """`reference.attend`."""
    batch, heads, head_dim = q.shape
    group, size = heads // k.shape[1], tile(k.dtype)
    # Of each row a number, for every row of the tile that is copied for it.
    in_tiles = partial(jnp.repeat, repeats=size, axis=-1)
    rows = pad(rows, BLOCK)
    bias, numbers, norms = jnp.zeros_like(rows, jnp.float32), (by_head(-(-count // BLOCK)),), ()
    if isinstance(weight, Angles):
        norms = (in_tiles(weight.norms[places(rows, k.shape[1])]),)
        numbers += (by_head(weight.shift), by_head(weight.length))
    elif weight is not None:
        bias = pad(weight, BLOCK)
    bias = in_tiles(jnp.where(there(rows, count), bias, -jnp.inf))
    place = jax.lax.broadcasted_iota(jnp.int32, bias.shape, 2) % size
    bias = jnp.where(place == in_tiles(rows % size), bias, -jnp.inf)
    one = lambda a: pl.BlockSpec((None, 1, a.shape[-1]), lambda i, *_: (i, 0, 0))  # noqa: E731
    query, *weights = (by_head(a)[:, None] for a in (q.astype(k.dtype), bias, *norms))
    indices = by_head(rows // size * size)[:, None]
    sums = [(batch * heads, 1, head_dim), (batch * heads, 1, LANES)]
    sums = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sums]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    out, lse = pl.pallas_call(
        partial(_attend_head, how=how, group=group, size=size, angles=bool(norms)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(batch * heads,),
            in_specs=[
                pl.BlockSpec(
                    (None, 1, indices.shape[-1]),
                    lambda i, *_: (i, 0, 0),
                    memory_space=pltpu.SMEM,
                ),
                one(query),
                in_hbm,
                in_hbm,
                *map(one, weights),
            ],
            out_specs=[one(a) for a in sums],
            scratch_shapes=[
                pltpu.VMEM((2, BLOCK * size, head_dim), k.dtype),
                pltpu.VMEM((2, BLOCK * size, head_dim), v.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=sums,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(*numbers, indices, query, by_head(k), by_head(v), *weights)
    return Attended(out.reshape(q.shape), lse[:, 0, 0].reshape(q.shape[:2]))


def _attend_head(*refs, how: How, group: int, size: int, angles: bool) -> None:
    numbers, refs = refs[: 1 + 2 * angles], refs[1 + 2 * angles :]
    rows_ref, q_ref, k_ref, v_ref, bias_ref, *norms = refs[:-5]
    out_ref, lse_ref, keys_ref, values_ref, arrived = refs[-5:]
    head = pl.program_id(0)
    cache = jax.lax.div(head, np.int32(group))
    blocks = numbers[0][head]

    def start(block: Array) -> None:
        side = jax.lax.rem(block, np.int32(2))

        def copy(i: Array, _: None) -> None:
            row = rows_ref[0, block * BLOCK + i]
            from_, to = (pl.ds(pl.multiple_of(at, size), size) for at in (row, i * size))
            for whole, buffer in ((k_ref, keys_ref), (v_ref, values_ref)):
                rows = whole.at[cache, from_]
                pltpu.make_async_copy(rows, buffer.at[side, to], arrived.at[side]).start()

        jax.lax.fori_loop(0, BLOCK, copy, None, unroll=UNROLL)

    def wait(side: Array) -> None:
        for buffer in (keys_ref, values_ref):  # for as many bytes as all of its copies bring
            whole = buffer.at[side]
            pltpu.make_async_copy(whole, whole, arrived.at[side]).wait()

    def attend_block(block: Array, so_far: Sums) -> Sums:
        side = jax.lax.rem(block, np.int32(2))
        pl.when(block + 1 < blocks)(lambda: start(block + 1))
        wait(side)
        here = pl.ds(pl.multiple_of(block * BLOCK * size, LANES), BLOCK * size)
        product = _dot(q_ref[...], keys_ref[side], 1)
        weight = bias_ref[:, here]
        if angles:
            shift, length = (ref[head] for ref in numbers[1:])
            weight += how.weigh(cosine(product, Angles(norms[0][:, here], shift, length)))
        values = values_ref[side]
        return absorb(so_far, logits(how, product, weight), lambda p: _dot(p, values, 0))

    pl.when(blocks > 0)(lambda: start(jnp.int32(0)))
    sums = jax.lax.fori_loop(0, blocks, attend_block, nothing(out_ref.shape))
    out, lse = finish(sums)
    out_ref[...] = out
    lse_ref[...] = jnp.broadcast_to(lse, lse_ref.shape)


def _dot(x: Array, y: Array, axis: int) -> Array:
    return jax.lax.dot_general(
        x.astype(y.dtype), y, (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
