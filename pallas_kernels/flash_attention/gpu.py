"""Flash attention on an NVIDIA GPU in Triton. No GPU has run it yet; it is compiled for an H100.

One program per block of queries and query head. jax 0.12 deprecates Triton in Pallas. Once it is
removed, `supports` returns False and XLA's form is chosen. cuDNN's kernel, which JAX has as
`jax.nn.dot_product_attention`, cannot replace this one: it rounds the log-sum-exp to the dtype of
the output, so that parts cannot be merged, and it has no mask for a ring that has wrapped.
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
from jax.tree_util import PyTreeDef

from jaxkv.pallas_kernels import triton
from jaxkv.pallas_kernels.flash_attention.reference import KeySet, capped, in_window
from jaxkv.pallas_kernels.online_softmax import (
    AttentionOutput,
    Sums,
    accumulate,
    empty_sums,
    normalize,
)

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # deprecated since jax 0.12
    plgpu = None

QUERIES = 64  # of one program
KEYS = 64  # in the registers of a program at a time
SMALLEST = 16  # the least size of a product
HEAD_DIMS = 16, 32, 64, 128, 256
# The fields of a KeySet that are arrays, in the order of its leaves.
DATA = "q", "k", "v", "end", "log_weight", "query_positions", "key_positions"


def refusal(head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot read queries and keys of this head dim and dtype; None if it can."""
    if plgpu is None:
        return "this JAX has no Triton"
    if not triton.is_supported():
        return "a GPU has a compute capability below 8.0"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"the dtype is {dtype}, not bfloat16 or float16"
    if head_dim not in HEAD_DIMS:
        return f"the head dim is {head_dim}, not {', '.join(map(str, HEAD_DIMS))}"
    return None


def attend(
    sets: Sequence[KeySet], scale: float, softcap: float | None, interpret: bool = False
) -> AttentionOutput:
    """`reference.attend`."""
    batch, tokens, heads, head_dim = sets[0].q.shape
    group = heads // sets[0].k.shape[1]
    size = max(SMALLEST, min(QUERIES, pl.next_power_of_2(tokens)))
    padded = pl.cdiv(tokens, size) * size
    of_query = pl.BlockSpec((None, size), lambda t, n, b: (b, t))
    queries = pl.BlockSpec((None, size, None, head_dim), lambda t, n, b: (b, t, n, 0))
    operands, specs = [], []
    for keys in sets:
        slots = keys.k.shape[2]
        of_key = pl.BlockSpec((None, slots), lambda t, n, b: (b, 0))
        of_head = pl.BlockSpec(
            (None, None, slots, head_dim),
            lambda t, n, b: (b, jax.lax.div(n, np.int32(group)), 0, 0),
        )
        spec_of = KeySet(queries, of_head, of_head, of_query, of_key, of_query, of_key)
        for name in ("q", "end", "query_positions"):  # a query that is added has the end 0
            if getattr(keys, name) is not None:
                keys = replace(keys, **{name: _pad(getattr(keys, name), padded)})
        operands += jax.tree.leaves(keys)
        specs += [getattr(spec_of, name) for name in DATA if getattr(keys, name) is not None]
    out, lse = pl.pallas_call(
        partial(
            _attend_block, structure=jax.tree.structure(tuple(sets)), scale=scale, softcap=softcap
        ),
        grid=(padded // size, heads, batch),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((None, size, None, head_dim), lambda t, n, b: (b, t, n, 0)),
            pl.BlockSpec((None, size, None), lambda t, n, b: (b, t, n)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, padded, heads, head_dim), sets[0].q.dtype),
            jax.ShapeDtypeStruct((batch, padded, heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(*operands)
    return AttentionOutput(out[:, :tokens].astype(jnp.float32), lse[:, :tokens])


def _pad(array: Array, tokens: int) -> Array:
    return jnp.pad(array, [(0, 0), (0, tokens - array.shape[1])] + [(0, 0)] * (array.ndim - 2))


def _attend_block(*refs, structure: PyTreeDef, scale: float, softcap: float | None) -> None:
    *inputs, out_ref, lse_ref = refs
    sums = empty_sums(out_ref.shape)
    for keys in jax.tree.unflatten(structure, inputs):
        sums = _attend_set(sums, keys, scale, softcap)
    out, lse = normalize(sums)
    out_ref[...] = out.astype(out_ref.dtype)
    lse_ref[...] = lse[:, 0]


def _attend_set(sums: Sums, keys: KeySet, scale: float, softcap: float | None) -> Sums:
    """The sums with the keys of one set, whose arrays are references."""
    slots = keys.k.shape[0]
    size = max(SMALLEST, min(KEYS, pl.next_power_of_2(slots)))
    q, end = keys.q[...], keys.end[...]

    def attend_keys(i: Array, so_far: Sums) -> Sums:
        slot = i * size + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
        at = pl.ds(i * size, size) if slots % size == 0 else jnp.minimum(slot, slots - 1)
        k, v = keys.k[at, :], keys.v[at, :]
        seen = slot[None, :] < end[:, None]
        if keys.first:
            seen &= (slot >= keys.first)[None, :]
        if keys.window is not None:
            queries, positions = keys.query_positions[...], keys.key_positions[at]
            seen &= in_window(queries[:, None], positions[None, :], keys.window)
        logits = capped(_dot(q, k, 1), scale, softcap)
        if keys.log_weight is not None:
            logits += keys.log_weight[at][None, :]
        logits = jnp.where(seen, logits, np.float32(-np.inf))
        return accumulate(so_far, logits, lambda share: _dot(share.astype(v.dtype), v, 0))

    return jax.lax.fori_loop(0, pl.cdiv(jnp.max(end), size), attend_keys, sums)


def _dot(x: Array, y: Array, axis: int) -> Array:
    return jax.lax.dot_general(
        x, y, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )
