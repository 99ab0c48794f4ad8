"""Attention in parts: over slots with a bias, inside a chunk, and the exact merge of both.

`chunked_scan` splits a long chunk for policies whose `update` takes a short one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import rows
from jaxkv.contract import Chunk, Partial, Spec
from jaxkv.pallas_kernels.flash_attention import KeySet, flash_attention
from jaxkv.platform import cpu as xla_cpu
from jaxkv.platform import gpu as xla_gpu
from jaxkv.rows import Rows
from jaxkv.typing import Array, Bool, Float, Float32, UInt32

Bias = Float32[Array, "#B #K #G #T #S"] | Callable[[Array | int, int], Array] | None

Carry = TypeVar("Carry")
Update = Callable[[Carry, Chunk], tuple[Partial, Carry]]

_BLOCK_SLOTS = 1024  # slots per block; up to twice as many are read at once
_BLOCK_QUERIES = 512
_MAX_UNROLLED = 1024  # queries; the blocks of a longer chunk are scanned, not unrolled


def slot_attention(
    q: Float[Array, "B T N H"],
    k: Rows,
    v: Rows,
    bias: Bias,
    scale: float,
    softcap: float | None = None,
    return_weights: bool = False,
) -> Partial | tuple[Partial, Float32[Array, "B K G T S"]]:
    """Softmax attention of q over slots k, v [B,K,S,H]: the primitive that every policy uses.

    q and k are rotated already; k and v may be in int8. bias [#B,#K,#G,#T,#S] is added after scale
    and softcap: masks (-inf), importance weights, hash probabilities and ALiBi are all this one
    argument. In place of an array it may be a function of (first slot, number of slots), called per
    block. Query heads n*G .. n*G+G-1 share KV head n. Memory is linear in T and S, because many
    slots are read in blocks.

    return_weights: also return the softmax weights [B,K,G,T,S], in memory at once, for policies
    that score keys by attention. They sum to 1 over these slots. After a merge with other parts, a
    weight is exp(lse of these slots - lse of the merge) times as large.
    """
    queries, slots = q.shape[1], k.shape[2]
    if return_weights:
        logits = _logits(q, k, _cut_bias(bias, 0, slots), scale, softcap)
        attended = blend(logits, v)
        return attended, _softmax_weights(logits, attended)
    blocks_end = slots // _BLOCK_SLOTS * _BLOCK_SLOTS
    attend = partial(xla_cpu.attend_by_head, partial(_attend, scale=scale, softcap=softcap))
    if queries == 1:
        return xla_cpu.attend_filled(attend, q, k, v, _cut_bias(bias, 0, slots))
    if slots <= 2 * _BLOCK_SLOTS:
        return attend(q, k, v, _cut_bias(bias, 0, slots), 0, size=slots)

    def attend_block(so_far: Partial, start: Array) -> tuple[Partial, None]:
        block_bias = _cut_bias(bias, start, _BLOCK_SLOTS)

        def with_block() -> Partial:
            return merge(so_far, attend(q, k, v, block_bias, start, size=_BLOCK_SLOTS))

        if block_bias is None:
            return with_block(), None
        # A block that no query sees is skipped: beyond the causal mask, or empty slots.
        return jax.lax.cond(jnp.any(block_bias > -jnp.inf), with_block, lambda: so_far), None

    nothing = Partial(
        jnp.zeros((*q.shape[:3], v.shape[-1]), jnp.float32),
        jnp.full(q.shape[:3], -jnp.inf, jnp.float32),
    )
    blocks, _ = jax.lax.scan(attend_block, nothing, jnp.arange(0, blocks_end, _BLOCK_SLOTS))
    if blocks_end == slots:
        return blocks
    rest = _cut_bias(bias, blocks_end, slots - blocks_end)
    return merge(blocks, attend(q, k, v, rest, blocks_end, size=slots - blocks_end))


def _cut_bias(bias: Bias, start: Array | int, size: int) -> Array | None:
    if callable(bias):
        return bias(start, size)
    if bias is None or bias.shape[-1] == 1:
        return bias
    return jax.lax.dynamic_slice_in_dim(bias, start, size, 4)


def _attend(
    q: Array,
    k: Rows,
    v: Rows,
    bias: Array | None,
    start: Array | int,
    *,
    size: int,
    scale: float,
    softcap: float | None,
) -> Partial:
    """`slot_attention` to the slots start .. start+size-1. bias: of these slots only."""
    if size < k.shape[2]:
        k, v = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, 2), (k, v))
    return blend(_logits(q, k, bias, scale, softcap), v)


def _logits(
    q: Array, k: Rows, bias: Array | None, scale: float, softcap: float | None
) -> Float32[Array, "B K G T S"]:
    logits = scores(q, k, scale, softcap)
    return logits if bias is None else logits + bias


def _softmax_weights(
    logits: Float32[Array, "B K G T S"], partial: Partial
) -> Float32[Array, "B K G T S"]:
    """The weights in the softmax whose output is `partial`."""
    batch, kv_heads, group, queries, _ = logits.shape
    lse = partial.lse.reshape(batch, queries, kv_heads, group).transpose(0, 2, 3, 1)
    return jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse)[..., None])


def masked_bias(
    spec: Spec,
    visible: Bool[Array, "B ... T S"],
    queries: UInt32[Array, "B T"],
    keys: UInt32[Array, "B ... S"],
    kv_heads: int,
) -> Float32[Array, "... T S"]:
    """0 where a query sees a slot and -inf elsewhere, plus the encoding's distance penalty.

    queries, keys: positions. visible, keys: with an axis K where slots differ by KV head.
    """
    visible = visible if visible.ndim == 4 else visible[:, None]
    bias = jnp.where(visible, np.float32(0), -jnp.inf)[:, :, None]
    penalty = spec.encoding.bias(queries, keys, kv_heads)
    return bias if penalty is None else bias + penalty


def scores(
    q: Float[Array, "B T N H"],
    k: Rows,
    scale: float,
    softcap: float | None = None,
) -> Float32[Array, "B K G T S"]:
    """Scaled and capped logits of every query and slot; k [B,K,S,H]."""
    batch, queries, heads, head_dim = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    k, scales = xla_cpu.flat_rows(k)
    logits = batched_dot(
        q.reshape(batch * kv_heads, heads // kv_heads * queries, head_dim), k, contract=(2, 2)
    )
    logits = logits * np.float32(scale)
    if scales is not None:
        logits = logits * scales
    if softcap is not None:
        logits = np.float32(softcap) * jnp.tanh(logits / np.float32(softcap))
    return logits.reshape(batch, kv_heads, heads // kv_heads, queries, slots)


def blend(logits: Float32[Array, "B K G T S"], v: Rows) -> Partial:
    """The softmax of biased logits over slots, applied to their values v [B,K,S,H]."""
    batch, kv_heads, group, queries, slots = logits.shape
    logits = logits.reshape(batch * kv_heads, group * queries, slots)
    # Any maximum gives the same result, so it needs no gradient.
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf))
    # A query that sees no key has the maximum -inf; with 0 its exponentials are 0, not NaN.
    top = jnp.where(top == -jnp.inf, np.float32(0), top)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe = jnp.where(total == 0, np.float32(1), total)
    v, scales = xla_cpu.flat_rows(v)
    weights = weights.astype(v.dtype) if scales is None else weights * scales
    product = partial(batched_dot, contract=(2, 1))
    if queries == 1:
        product = partial(xla_cpu.sum_of_parts, product)
    out = product(weights, v) / safe
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
    out = out.reshape(batch, kv_heads, group, queries, -1).transpose(0, 3, 1, 2, 4)
    lse = lse.reshape(batch, kv_heads, group, queries).transpose(0, 3, 1, 2)
    heads = kv_heads * group
    return Partial(out.reshape(batch, queries, heads, -1), lse.reshape(batch, queries, heads))


def batched_dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Batched product over the first axis, accumulated in float32; float32 stays float32."""
    if b.dtype == jnp.int8:
        return xla_cpu.product_with_int8(batched_dot, a, b, contract)
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def merge(*parts: Partial) -> Partial:
    """Attention over all keys, from attention over disjoint sets of them, by log-sum-exp."""
    if len(parts) == 1:
        return parts[0]
    lse = jnp.stack([part.lse for part in parts])
    top = jax.lax.stop_gradient(jnp.max(lse, axis=0))
    top = jnp.where(top == -jnp.inf, np.float32(0), top)
    weights = jnp.exp(lse - top[None])
    total = jnp.sum(weights, axis=0)
    safe = jnp.where(total == 0, np.float32(1), total)
    out = sum(part.out * (w / safe)[..., None] for part, w in zip(parts, weights, strict=True))
    return Partial(out, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe)))


def sink_logit(logits: Float[Array | np.ndarray, " N"], like: Partial) -> Partial:
    """A learned sink: one logit per query head that takes weight and gives no value.

    Zeros make it the zero sink, a softmax with 1 added to the denominator (StreamingLLM, section
    3.3). Merge it once, not once per part.
    """
    lse = jnp.broadcast_to(logits.astype(jnp.float32)[None, None, :], like.lse.shape)
    return Partial(jnp.zeros_like(like.out), lse)


def local_attention(
    spec: Spec,
    chunk: Chunk,
    window: int | None = None,
    hidden: Bool[Array, "B T"] | None = None,
    like: Rows | None = None,
) -> Partial:
    """Exact causal attention inside a chunk.

    window: a query sees keys less than this many positions back, its own included; None: all.
    hidden: keys that another part covers. like: rows of the cache; if they are in int8, the tokens
    of the chunk are read as they will be stored. Keys outside every query's view are skipped, so
    memory is linear in T; where a kernel reads the chunk, gradients take memory for all logits.
    """
    positions, valid = chunk.positions, chunk.valid
    shown = valid if hidden is None else valid & ~hidden
    if xla_gpu.reads_by_flash(spec, chunk.q, chunk.k if like is None else like):
        q, k = (spec.encoding.rotate(array, positions) for array in (chunk.q, chunk.k))
        k, v = (array.transpose(0, 2, 1, 3) for array in (k, chunk.v))
        sets = [chunk_keys(chunk, q, k, v, shown, window)]
        return Partial(*flash_attention(sets, spec.scale, spec.softcap))
    tokens = chunk.valid.shape[1]
    if tokens > _MAX_UNROLLED and (padding := -tokens % _BLOCK_QUERIES):
        pad = lambda a: jnp.pad(a, [(0, 0), (0, padding)] + [(0, 0)] * (a.ndim - 2))
        unseen = None if hidden is None else pad(hidden)
        padded = local_attention(spec, jax.tree.map(pad, chunk), window, unseen, like)
        return Partial(padded.out[:, :tokens], padded.lse[:, :tokens])
    q = spec.encoding.rotate(chunk.q, positions)
    keys_values = spec.encoding.rotate(chunk.k, positions), chunk.v
    k, v = (array.transpose(0, 2, 1, 3) for array in keys_values)
    if like is not None:
        k, v = rows.store(k, like), rows.store(v, like)

    def attend_block(start: Array | int, size: int, keys: int) -> Partial:
        """Queries start .. start+size-1 over the first `keys` keys."""
        query_positions = jax.lax.dynamic_slice_in_dim(positions, start, size, 1)
        query_valid = jax.lax.dynamic_slice_in_dim(valid, start, size, 1)
        # The order is that of the tokens; padding may be anywhere between them.
        order = start + jnp.arange(size)[:, None] >= jnp.arange(keys)[None, :]
        visible = order[None] & shown[:, None, :keys] & query_valid[:, :, None]
        if window is not None:
            distance = (query_positions[:, :, None] - positions[:, None, :keys]).astype(jnp.int32)
            visible &= distance < window
        bias = masked_bias(spec, visible, query_positions, positions[:, :keys], k.shape[1])
        queries = jax.lax.dynamic_slice_in_dim(q, start, size, 1)
        return slot_attention(
            queries, rows.cut(k, 0, keys), rows.cut(v, 0, keys), bias, spec.scale, spec.softcap
        )

    if tokens <= _MAX_UNROLLED:
        starts = range(0, tokens, _BLOCK_QUERIES)
        sizes = [min(_BLOCK_QUERIES, tokens - start) for start in starts]
        parts = [attend_block(a, n, a + n) for a, n in zip(starts, sizes, strict=True)]
        return Partial(*(jnp.concatenate(leaves, axis=1) for leaves in zip(*parts, strict=True)))
    # Many blocks are scanned, not unrolled: compiling would take longer than running.
    starts = jnp.arange(0, tokens, _BLOCK_QUERIES)
    parts = jax.lax.map(lambda start: attend_block(start, _BLOCK_QUERIES, tokens), starts)
    batch, heads = q.shape[0], q.shape[2]
    out = jnp.moveaxis(parts.out, 0, 1).reshape(batch, tokens, heads, -1)
    return Partial(out, jnp.moveaxis(parts.lse, 0, 1).reshape(batch, tokens, heads))


def chunk_keys(
    chunk: Chunk,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    shown: Bool[Array, "B T"],
    window: int | None = None,
) -> KeySet:
    """The tokens of a chunk that are shown, as `flash_attention` reads them, causally.

    q, k: rotated.
    """
    end = jnp.where(chunk.valid, jnp.arange(1, chunk.valid.shape[1] + 1)[None, :], 0)
    keys = KeySet(q, k, v, end, jnp.where(shown, np.float32(0), -jnp.inf)[:, None])
    return within(keys, chunk.positions, chunk.positions, window)


def within(
    keys: KeySet,
    query_positions: UInt32[Array, "B T"],
    key_positions: UInt32[Array, "B S"],
    window: int | None,
) -> KeySet:
    """The same keys, seen by queries fewer than `window` positions later; None: by all."""
    if window is None:
        return keys
    return replace(
        keys, window=window, query_positions=query_positions, key_positions=key_positions
    )


def chunked_scan(update: Update, carry: Carry, chunk: Chunk, size: int) -> tuple[Partial, Carry]:
    """`update` of the whole chunk, applied to at most `size` of its tokens at a time.

    For policies whose memory is quadratic in the chunk, and for those whose queries change what the
    next query sees.
    """
    batch, tokens = chunk.valid.shape
    if tokens <= size:
        return update(carry, chunk)
    padding = -tokens % size

    def split(leaf: jax.Array) -> jax.Array:
        padded = jnp.pad(leaf, [(0, 0), (0, padding)] + [(0, 0)] * (leaf.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, -1, size, *leaf.shape[2:]), 1, 0)

    def join(leaf: jax.Array) -> jax.Array:
        pieces = jnp.moveaxis(leaf, 0, 1)
        return pieces.reshape(batch, -1, *pieces.shape[3:])[:, :tokens]

    def update_piece(carry: Carry, piece: Chunk) -> tuple[Carry, Partial]:
        partial, carry = update(carry, piece)
        return carry, partial

    carry, partial = jax.lax.scan(update_piece, carry, jax.tree.map(split, chunk))
    return jax.tree.map(join, partial), carry
