"""The definition of the kernels, in XLA, and the mask that all implementations share.

Axis letters: B sequences, T queries, N query heads, K KV heads, S keys, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.pallas_kernels.online_softmax import AttentionOutput, accumulate, empty_sums, normalize

# The fields of a KeySet that are arrays, in the order of its leaves.
ARRAYS = "q", "k", "v", "end", "log_weight", "query_positions", "key_positions"


@partial(jax.tree_util.register_dataclass, data_fields=ARRAYS, meta_fields=("first", "window"))
@dataclass(frozen=True)
class KeySet:
    """Keys and values, and the queries as they are rotated for them.

    A query sees the slots first .. end-1. So no mask of queries by keys lies in memory, and a
    kernel reads no block of keys that is beyond the ends of its queries.

    q [B,T,N,H], k and v [B,K,S,H], of one dtype. end [B,T] int32, at most S: 0 for padding.
    log_weight [B,#K,S] float32: added to the logits; -inf hides a key. window: a query sees keys
    fewer than this many positions back. Only a window needs query_positions [B,T] and
    key_positions [B,S], both uint32; they may have wrapped.
    """

    q: Array
    k: Array
    v: Array
    end: Array
    log_weight: Array | None = None
    query_positions: Array | None = None
    key_positions: Array | None = None
    first: int = 0
    window: int | None = None


def attend(sets: Sequence[KeySet], scale: float, softcap: float | None) -> AttentionOutput:
    """`flash_attention`, with all logits in memory."""
    batch, tokens, heads, _ = sets[0].q.shape
    kv_heads, head_dim = sets[0].v.shape[1], sets[0].v.shape[3]
    grouped = batch, kv_heads, heads // kv_heads, tokens
    sums = empty_sums((*grouped, head_dim))
    for keys in sets:
        q = keys.q.transpose(0, 2, 1, 3).reshape(*grouped, -1)
        product = _product("bkgth,bksh->bkgts", q, keys.k)
        slot = jnp.arange(keys.k.shape[2])[None, None]
        positions = lambda keys=keys: (
            keys.query_positions[:, :, None],
            keys.key_positions[:, None],
        )
        seen = visible(keys, slot, keys.end[:, :, None], positions)
        bias = jnp.where(seen, np.float32(0), -jnp.inf)[:, None, None]
        if keys.log_weight is not None:
            bias += keys.log_weight[:, :, None, None]
        logits = capped(product, scale, softcap) + bias
        sums = accumulate(
            sums,
            logits,
            lambda share, v=keys.v: _product("bkgts,bksh->bkgth", share.astype(v.dtype), v),
        )
    out, lse = normalize(sums)
    out = out.reshape(batch, heads, tokens, head_dim).transpose(0, 2, 1, 3)
    return AttentionOutput(out, lse.reshape(batch, heads, tokens).transpose(0, 2, 1))


def visible(
    keys: KeySet, slot: Array, end: Array, positions: Callable[[], tuple[Array, Array]]
) -> Array:
    """Whether queries see slots; all shapes broadcast to [..., queries, slots].

    positions: gives those of the queries and of the slots, if `keys` has a window.
    """
    seen = slot < end
    if keys.first:
        seen &= slot >= keys.first
    if keys.window is not None:
        queries, stored = positions()
        distance = (queries - stored).astype(jnp.int32)
        seen &= (distance >= 0) & (distance < keys.window)
    return seen


def where_present(values: KeySet, keys: KeySet) -> list[Any]:
    """The fields of `values` in which `keys` has an array, in the order of its leaves."""
    return [getattr(values, name) for name in ARRAYS if getattr(keys, name) is not None]


def capped(product: Array, scale: float, softcap: float | None) -> Array:
    """The logits of products of queries and keys: softcap(scale x q.k)."""
    logits = product * np.float32(scale)
    if softcap is None:
        return logits
    return np.float32(softcap) * jnp.tanh(logits / np.float32(softcap))


def dot(x: Array, y: Array, axis: int) -> Array:
    """The product over the last axis of x and this axis of y, accumulated in float32."""
    return jax.lax.dot_general(
        x, y, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )


def _product(subscripts: str, a: Array, b: Array) -> Array:
    a = a.astype(b.dtype)
    if jax.default_backend() == "cpu":  # before jax 0.8 it multiplies no bfloat16 into float32
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)
