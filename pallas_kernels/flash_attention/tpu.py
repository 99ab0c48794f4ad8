"""Flash attention on a TPU, one program per set of keys. No TPU has run it yet.

A step of the grid reads one block of keys for one block of queries. Blocks of keys beyond the ends
of all queries of a block are neither computed nor copied. The outputs of the sets are merged by
XLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxkv.pallas_kernels.flash_attention.reference import (
    KeySet,
    capped,
    dot,
    visible,
    where_present,
)
from jaxkv.pallas_kernels.online_softmax import (
    AttentionOutput,
    Sums,
    accumulate,
    empty_sums,
    merge,
    normalize,
)

QUERIES = 256  # of one program
KEYS = 512  # in the registers of a program at a time
SMALLEST = 16  # slots: Mosaic multiplies no smaller block
HEAD_DIMS = 64, 128, 256


def refusal(head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot read queries and keys of this head dim and dtype; None if it can."""
    if dtype != jnp.bfloat16:
        return f"the dtype is {dtype}, not bfloat16"
    if head_dim not in HEAD_DIMS:
        return f"the head dim is {head_dim}, not {', '.join(map(str, HEAD_DIMS))}"
    return None


def attend(
    sets: Sequence[KeySet], scale: float, softcap: float | None, interpret: object = False
) -> AttentionOutput:
    """`reference.attend`."""
    parts = [_attend_set(keys, scale, softcap, interpret) for keys in sets]
    if len(parts) > 1:
        out, lse = merge(*(jnp.stack(leaves) for leaves in zip(*parts, strict=True)), axis=0)
    else:
        ((out, lse),) = parts
    return AttentionOutput(out, lse[..., 0])


def _attend_set(
    keys: KeySet, scale: float, softcap: float | None, interpret: object
) -> tuple[Array, Array]:
    """out [B,T,N,H] and lse [B,T,N,1]."""
    keys = _with_slots(keys, SMALLEST)
    batch, tokens, heads, head_dim = keys.q.shape
    kv_heads, slots = keys.k.shape[1:3]
    group, size = heads // kv_heads, min(QUERIES, pl.cdiv(tokens, 16) * 16)
    block = min(KEYS, slots)
    padded = pl.cdiv(tokens, size) * size
    column = lambda a: None if a is None else _pad(_signed(a), padded)[:, :, None]  # [B,T,1]
    row = lambda a: None if a is None else _signed(a)[:, None]  # [B,1,S]
    arrays = KeySet(
        _pad(keys.q, padded).transpose(0, 2, 1, 3), keys.k, keys.v,
        column(keys.end), None if keys.log_weight is None else keys.log_weight[:, :, None],
        column(keys.query_positions), row(keys.key_positions),
    )  # fmt: skip
    # The last block of keys that any query of a block sees.
    last = jnp.max(arrays.end.reshape(batch, padded // size, size), axis=2)
    last = jnp.maximum(pl.cdiv(last, block) - 1, -1).astype(jnp.int32)
    at = lambda b, t, s, last: jnp.minimum(s, jnp.maximum(last[b, t], 0))
    of_query = pl.BlockSpec((None, size, 1), lambda b, n, t, s, last: (b, t, 0))
    of_key = pl.BlockSpec((None, 1, block), lambda b, n, t, s, last: (b, 0, at(b, t, s, last)))
    shared = keys.log_weight is not None and keys.log_weight.shape[1] == 1
    of_weight = pl.BlockSpec(
        (None, None, 1, block),
        lambda b, n, t, s, last: (
            b,
            0 if shared else jax.lax.div(n, np.int32(group)),
            0,
            at(b, t, s, last),
        ),
    )
    of_head = pl.BlockSpec(
        (None, None, block, head_dim),
        lambda b, n, t, s, last: (b, jax.lax.div(n, np.int32(group)), at(b, t, s, last), 0),
    )
    queries = pl.BlockSpec((None, None, size, head_dim), lambda b, n, t, s, last: (b, n, t, 0))
    specs = KeySet(queries, of_head, of_head, of_query, of_weight, of_query, of_key)
    leaves, structure = jax.tree.flatten(replace(arrays, first=keys.first, window=keys.window))
    number = pl.BlockSpec((None, None, size, 1), lambda b, n, t, s, last: (b, n, t, 0))
    out, lse = pl.pallas_call(
        partial(_attend_block, structure=structure, slots=slots, scale=scale, softcap=softcap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, padded // size, pl.cdiv(slots, block)),
            in_specs=where_present(specs, arrays),
            out_specs=[queries, number],
            scratch_shapes=[
                pltpu.VMEM((size, 1), jnp.float32),
                pltpu.VMEM((size, 1), jnp.float32),
                pltpu.VMEM((size, head_dim), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, padded, head_dim), keys.q.dtype),
            jax.ShapeDtypeStruct((batch, heads, padded, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )(last, *leaves)
    out = out[:, :, :tokens].transpose(0, 2, 1, 3).astype(jnp.float32)
    return out, lse[:, :, :tokens].transpose(0, 2, 1, 3)


def _with_slots(keys: KeySet, slots: int) -> KeySet:
    """At least so many slots; those that are added are beyond all ends."""
    if (missing := slots - keys.k.shape[2]) <= 0:
        return keys
    pad = lambda a, axis: jnp.pad(a, [(0, missing if n == axis else 0) for n in range(a.ndim)])
    axes = {"k": 2, "v": 2, "log_weight": 2, "key_positions": 1}
    arrays = {name: getattr(keys, name) for name in axes}
    padded = {name: pad(a, axes[name]) for name, a in arrays.items() if a is not None}
    return replace(keys, **padded)


def _signed(array: Array) -> Array:
    """Positions as int32, whose differences are the same."""
    if array.dtype == jnp.uint32:
        return jax.lax.bitcast_convert_type(array, jnp.int32)
    return array.astype(jnp.int32)


def _pad(array: Array, tokens: int) -> Array:
    return jnp.pad(array, [(0, 0), (0, tokens - array.shape[1])] + [(0, 0)] * (array.ndim - 2))


def _attend_block(
    last_ref, *refs, structure, slots: int, scale: float, softcap: float | None
) -> None:
    *inputs, out_ref, lse_ref, top_ref, total_ref, sum_ref = refs
    keys: KeySet = jax.tree.unflatten(structure, inputs)
    step, sums = pl.program_id(3), (top_ref, total_ref, sum_ref)

    @pl.when(step == 0)
    def _() -> None:
        for ref, empty in zip(sums, empty_sums(sum_ref.shape), strict=True):
            ref[...] = empty

    @pl.when(step <= last_ref[pl.program_id(0), pl.program_id(2)])
    def _() -> None:
        q, k, v = keys.q[...], keys.k[...], keys.v[...]
        shape = q.shape[0], k.shape[0]
        slot = step * shape[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        positions = lambda: (keys.query_positions[...], keys.key_positions[...])
        seen = visible(keys, slot, keys.end[...], positions)
        logits = capped(dot(q, k, 1), scale, softcap)
        if keys.log_weight is not None:
            logits += keys.log_weight[...]
        logits = jnp.where(seen, logits, np.float32(-np.inf))
        if slots % shape[1]:  # beyond the last slot a block has any numbers, and 0 x NaN is NaN
            row = step * shape[1] + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0)
            v = jnp.where(row < slots, v, jnp.zeros_like(v))
        so_far = Sums(*(ref[...] for ref in sums))
        after = accumulate(so_far, logits, lambda share: dot(share.astype(v.dtype), v, 0))
        for ref, new in zip(sums, after, strict=True):
            ref[...] = new

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        out, lse = normalize(Sums(*(ref[...] for ref in sums)))
        out_ref[...] = out.astype(out_ref.dtype)
        lse_ref[...] = lse
