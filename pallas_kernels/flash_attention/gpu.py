"""Flash attention on an NVIDIA GPU in Triton. No GPU has run it yet; it is compiled for an H100.

One program per block of queries and query head. The one query of a sequence in decode is read by
several programs per KV head, which share its keys. jax 0.12 deprecates Triton in Pallas. Once it is
removed, `refusal` says so and XLA's form is chosen. cuDNN's kernel, which JAX has as
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
from jaxkv.pallas_kernels.flash_attention.reference import (
    KeySet,
    capped,
    dot,
    visible,
    where_present,
)
from jaxkv.pallas_kernels.merge_parts import merge_parts
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
PROGRAMS = 128  # aimed at for the one query of a sequence: about one per multiprocessor
HEAD_DIMS = 16, 32, 64, 128, 256


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
    kv_heads = sets[0].k.shape[1]
    parts, folded = 1, tokens == 1
    if folded:  # the queries of a KV head are read together, and its keys by many programs
        sets = [_by_kv_head(keys) for keys in sets]
        tokens, heads = sets[0].q.shape[1:3]
        blocks = max(pl.cdiv(keys.k.shape[2], KEYS) for keys in sets)
        # Independent of the batch, so that other sequences do not change how keys are split.
        parts = pl.next_power_of_2(min(blocks, pl.cdiv(PROGRAMS, kv_heads)) + 1) // 2
    group = heads // kv_heads
    size = max(SMALLEST, min(QUERIES, pl.next_power_of_2(tokens)))
    # A decode loop carries caches without an axis of one sequence, and a kernel that reads them as
    # they are carried leaves the write of a token one kernel.
    flat = lambda rows: rows.reshape(-1, *rows.shape[2:])
    operands = jax.tree.leaves([replace(keys, k=flat(keys.k), v=flat(keys.v)) for keys in sets])
    specs = [spec for keys in sets for spec in _block_specs(keys, group)]
    blocks = pl.cdiv(tokens, size)
    padded = blocks * size
    dtype = jnp.float32 if parts > 1 else sets[0].q.dtype
    out, lse = pl.pallas_call(
        partial(
            _attend_block,
            structure=jax.tree.structure(tuple(sets)),
            tokens=tokens,
            parts=parts,
            scale=scale,
            softcap=softcap,
        ),
        grid=(blocks, parts, heads, batch),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((None, None, size, None, head_dim), lambda t, p, n, b: (p, b, t, n, 0)),
            pl.BlockSpec((None, None, size, None), lambda t, p, n, b: (p, b, t, n)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((parts, batch, padded, heads, head_dim), dtype),
            jax.ShapeDtypeStruct((parts, batch, padded, heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(*operands)
    if parts > 1:
        out, lse = merge_parts(out, lse, tokens, sets[0].q.dtype, interpret)
    else:
        out, lse = out[0, :, :tokens], lse[0, :, :tokens]
    if folded:  # [B,G,K,*] as [B,1,N,*]
        out, lse = (a.swapaxes(1, 2).reshape(batch, 1, -1, *a.shape[3:]) for a in (out, lse))
    return AttentionOutput(out.astype(jnp.float32), lse)


def _block_specs(keys: KeySet, group: int) -> list[pl.BlockSpec]:
    """Where a program finds the arrays of a set, all queries and slots of its head."""
    tokens, (_, kv_heads, slots, head_dim) = keys.q.shape[1], keys.k.shape
    head = lambda n: jax.lax.div(n, np.int32(group))
    shared = keys.log_weight is not None and keys.log_weight.shape[1] == 1
    of_query = pl.BlockSpec((None, tokens), lambda t, p, n, b: (b, 0))
    of_key = pl.BlockSpec((None, slots), lambda t, p, n, b: (b, 0))
    row = lambda t, p, n, b: (b * kv_heads + head(n), 0, 0)
    of_head = pl.BlockSpec((None, slots, head_dim), row)
    weights = lambda t, p, n, b: (b, 0 if shared else head(n), 0)
    specs = KeySet(
        pl.BlockSpec((None, tokens, None, head_dim), lambda t, p, n, b: (b, 0, n, 0)),
        of_head, of_head, of_query, pl.BlockSpec((None, None, slots), weights), of_query, of_key,
    )  # fmt: skip
    return where_present(specs, keys)


def _by_kv_head(keys: KeySet) -> KeySet:
    """One token: the query heads of a KV head as tokens [B,G,K,H], which see the same keys."""
    batch, _, heads, head_dim = keys.q.shape
    kv_heads = keys.k.shape[1]
    group = heads // kv_heads
    q = keys.q.reshape(batch, kv_heads, group, head_dim).transpose(0, 2, 1, 3)
    repeat = lambda a: None if a is None else jnp.broadcast_to(a, (batch, group))
    where = {"end": repeat(keys.end), "query_positions": repeat(keys.query_positions)}
    return replace(keys, q=q, **where)


def _attend_block(
    *refs,
    structure: PyTreeDef,
    tokens: int,
    parts: int,
    scale: float,
    softcap: float | None,
) -> None:
    *inputs, out_ref, lse_ref = refs
    size, sums = out_ref.shape[0], empty_sums(out_ref.shape)
    first = pl.program_id(0) * size
    at = pl.ds(first, size)
    if tokens % size:  # the last queries are read again, and their output is cut off
        query = first + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
        at = jnp.minimum(query, tokens - 1)
    for keys in jax.tree.unflatten(structure, inputs):
        sums = _attend_set(sums, keys, at, pl.program_id(1), parts, scale, softcap)
    out, lse = normalize(sums)
    out_ref[...] = out.astype(out_ref.dtype)
    lse_ref[...] = lse.reshape(lse_ref.shape)


def _attend_set(
    sums: Sums,
    keys: KeySet,
    queries: pl.Slice | Array,
    part: Array,
    parts: int,
    scale: float,
    softcap: float | None,
) -> Sums:
    """The sums with the keys of one set, whose arrays are references, that are in this part."""
    slots = keys.k.shape[0]
    # Wider heads need more registers and shared memory.
    limit = KEYS if keys.k.shape[1] <= 128 else KEYS // 2
    size = max(SMALLEST, min(limit, pl.next_power_of_2(slots)))
    begin = keys.first // size
    q, end = keys.q[queries, :], keys.end[queries]

    def attend_keys(i: Array, so_far: Sums) -> Sums:
        # Blocks alternate between parts, so that all parts have equal work for any number of keys.
        first = (begin + part + i * parts) * size
        slot = first + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
        at = pl.ds(first, size) if slots % size == 0 else jnp.minimum(slot, slots - 1)
        k, v = keys.k[at, :], keys.v[at, :]
        positions = lambda: (
            keys.query_positions[queries][:, None],
            keys.key_positions[at][None, :],
        )
        seen = visible(keys, slot[None, :], end[:, None], positions)
        logits = capped(dot(q, k, 1), scale, softcap)
        if keys.log_weight is not None:
            logits += keys.log_weight[at][None, :]
        logits = jnp.where(seen, logits, np.float32(-np.inf))
        return accumulate(so_far, logits, lambda share: dot(share.astype(v.dtype), v, 0))

    blocks = pl.cdiv(jnp.max(end), size) - begin
    return jax.lax.fori_loop(0, pl.cdiv(blocks - part, parts), attend_keys, sums)
