"""Sampled attention on a TPU, one program per query head. No TPU has run it yet.

The caches stay in HBM. Each sampled slot is copied to the chip by itself; the slots of the next
block are copied during the computation of this one. Float32 is copied slot by slot. For a dtype of
16 bits the smallest copy is a tile of eight slots, and the other slots get a bias of -inf.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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
    cache_index,
    cosine,
    flatten_heads,
    in_sample,
    logits,
    pad_sample,
)

LANES = 128
BLOCK = 128  # slots per iteration
UNROLL = 8  # of the loop that starts their copies
MAX_SAMPLE = 16_384  # slots of a sample: limited by the scalar memory of a program

# Constants of `dense_is_cheaper`. No TPU has confirmed them.
ISSUE = 20e-9  # seconds for the scalar core to start a copy: 15e-9 to 30e-9
BANDWIDTH = 819e9  # bytes per second of a v5e
SCATTER = 10e-9  # seconds for XLA to scatter one number


def tile(dtype: jnp.dtype) -> int:
    """Slots in the smallest copy."""
    return 1 if dtype == jnp.float32 else 8


def supports(k: Array, sample: int) -> bool:
    """Whether the kernel supports samples of this many slots of this cache [B,K,S,H]."""
    num_slots, head_dim = k.shape[2:]
    dtype = k.dtype in (jnp.float32, jnp.bfloat16)
    return dtype and head_dim % LANES == 0 and num_slots % 8 == 0 and sample <= MAX_SAMPLE


def dense_is_cheaper(sample: int, group: int, slots: int, head_dim: int, itemsize: int) -> bool:
    """Whether a TPU should attend to all slots faster than to `sample` slots per query head.

    The kernel makes 2 x group x sample copies per KV head, each at least ISSUE seconds of the
    scalar core. Dense reads every key and value once per group. So dense wins at G = 4 and a sample
    of 2 %, in half precision by far, and the kernel wins at G = 1. No TPU has confirmed the
    constants. `sample` is the capacity of a sample; a draw fills a part of it.
    """
    slot = head_dim * itemsize
    copied = (1 if itemsize == 4 else 8) * slot
    copies = 2 * group * sample * max(ISSUE, copied / BANDWIDTH)
    return 2 * slots * slot / BANDWIDTH + group * sample * SCATTER < copies


def attend(
    settings: LogitSettings,
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    count: Array,
    weight: Weight,
    interpret: object = False,
) -> AttentionOutput:
    """`reference.attend`."""
    batch, heads, head_dim = q.shape
    group, size = heads // k.shape[1], tile(k.dtype)
    # Repeat a number per sampled slot for every slot of its tile.
    in_tiles = partial(jnp.repeat, repeats=size, axis=-1)
    slots = pad_sample(slots, BLOCK)
    bias, numbers, norms = (
        jnp.zeros_like(slots, jnp.float32),
        (flatten_heads(-(-count // BLOCK)),),
        (),
    )
    if isinstance(weight, Angles):
        norms = (in_tiles(weight.norms[cache_index(slots, k.shape[1])]),)
        numbers += (flatten_heads(weight.shift), flatten_heads(weight.length))
    elif weight is not None:
        bias = pad_sample(weight, BLOCK)
    bias = in_tiles(jnp.where(in_sample(slots, count), bias, -jnp.inf))
    place = jax.lax.broadcasted_iota(jnp.int32, bias.shape, 2) % size
    bias = jnp.where(place == in_tiles(slots % size), bias, -jnp.inf)
    block_spec = lambda a: pl.BlockSpec((None, 1, a.shape[-1]), lambda i, *_: (i, 0, 0))
    query, *weights = (flatten_heads(a)[:, None] for a in (q.astype(k.dtype), bias, *norms))
    indices = flatten_heads(slots // size * size)[:, None]
    sums = [(batch * heads, 1, head_dim), (batch * heads, 1, LANES)]
    sums = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sums]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    out, lse = pl.pallas_call(
        partial(_attend_head, settings=settings, group=group, size=size, angles=bool(norms)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(batch * heads,),
            in_specs=[
                pl.BlockSpec(
                    (None, 1, indices.shape[-1]),
                    lambda i, *_: (i, 0, 0),
                    memory_space=pltpu.SMEM,
                ),
                block_spec(query),
                in_hbm,
                in_hbm,
                *map(block_spec, weights),
            ],
            out_specs=[block_spec(a) for a in sums],
            scratch_shapes=[
                pltpu.VMEM((2, BLOCK * size, head_dim), k.dtype),
                pltpu.VMEM((2, BLOCK * size, head_dim), v.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=sums,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(*numbers, indices, query, flatten_heads(k), flatten_heads(v), *weights)
    return AttentionOutput(out.reshape(q.shape), lse[:, 0, 0].reshape(q.shape[:2]))


def _attend_head(*refs, settings: LogitSettings, group: int, size: int, angles: bool) -> None:
    numbers, refs = refs[: 1 + 2 * angles], refs[1 + 2 * angles :]
    slots_ref, q_ref, k_ref, v_ref, bias_ref, *norms = refs[:-5]
    out_ref, lse_ref, keys_ref, values_ref, arrived = refs[-5:]
    head = pl.program_id(0)
    cache = jax.lax.div(head, np.int32(group))
    blocks = numbers[0][head]

    def start(block: Array) -> None:
        side = jax.lax.rem(block, np.int32(2))

        def copy(i: Array, _: None) -> None:
            slot = slots_ref[0, block * BLOCK + i]
            source, target = (pl.ds(pl.multiple_of(at, size), size) for at in (slot, i * size))
            for cache_ref, buffer in ((k_ref, keys_ref), (v_ref, values_ref)):
                tile_ref = cache_ref.at[cache, source]
                pltpu.make_async_copy(tile_ref, buffer.at[side, target], arrived.at[side]).start()

        jax.lax.fori_loop(0, BLOCK, copy, None, unroll=UNROLL)

    def wait(side: Array) -> None:
        for buffer in (keys_ref, values_ref):  # for the bytes of all copies of the block
            block_ref = buffer.at[side]
            pltpu.make_async_copy(block_ref, block_ref, arrived.at[side]).wait()

    def attend_block(block: Array, so_far: Sums) -> Sums:
        side = jax.lax.rem(block, np.int32(2))
        pl.when(block + 1 < blocks)(lambda: start(block + 1))
        wait(side)
        block_slots = pl.ds(pl.multiple_of(block * BLOCK * size, LANES), BLOCK * size)
        product = _dot(q_ref[...], keys_ref[side], 1)
        weight = bias_ref[:, block_slots]
        if angles:
            shift, length = (ref[head] for ref in numbers[1:])
            weight += settings.weight_fn(
                cosine(product, Angles(norms[0][:, block_slots], shift, length))
            )
        values = values_ref[side]
        return accumulate(so_far, logits(settings, product, weight), lambda p: _dot(p, values, 0))

    pl.when(blocks > 0)(lambda: start(jnp.int32(0)))
    sums = jax.lax.fori_loop(0, blocks, attend_block, empty_sums(out_ref.shape))
    out, lse = normalize(sums)
    out_ref[...] = out
    lse_ref[...] = jnp.broadcast_to(lse, lse_ref.shape)


def _dot(x: Array, y: Array, axis: int) -> Array:
    return jax.lax.dot_general(
        x.astype(y.dtype),
        y,
        (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
