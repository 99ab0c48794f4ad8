"""Workarounds for XLA:CPU, the CPU backend of XLA, each with the measurement that justifies it.

Each function computes what its plain form computes. Other platforms compile the plain form, except
where the docstring says that the form is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.contract import Partial
from jaxkv.typing import Array, Float32, Int32

CACHED_LOGITS = 2**22  # of all heads; more exceed the processor's cache


def attend_by_head(
    attend: Callable[..., Partial],
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    start: Array | int,
    *,
    size: int,
) -> Partial:
    """`attend(q, k, v, bias, start, size=size)`; on a CPU one KV head after another if it is large.

    The logits of all heads of a long chunk exceed the processor's cache. Those of one head fit.
    No recorded measurement.
    """
    together = partial(attend, size=size)
    if q.shape[0] * q.shape[1] * q.shape[2] * size <= CACHED_LOGITS:
        return together(q, k, v, bias, start)
    by_head = partial(_attend_by_head, attend, size=size)
    return jax.lax.platform_dependent(q, k, v, bias, start, cpu=by_head, default=together)


def _attend_by_head(attend, q, k, v, bias, start, *, size) -> Partial:
    batch, queries, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    split = q.reshape(batch, queries, kv_heads, group, -1).transpose(0, 2, 1, 3, 4)

    def one(at: Array) -> Partial:
        sequence, head = at // kv_heads, at % kv_heads

        def pick(a: Array, first: Array | int = 0, count: int | None = None) -> Array:
            """One sequence and KV head of [#B,#K,X,...], and `count` of X from `first` on."""
            of = (sequence if a.shape[0] > 1 else 0, head if a.shape[1] > 1 else 0)
            sizes = (1, 1, a.shape[2] if count is None else count, *a.shape[3:])
            return jax.lax.dynamic_slice(a, (*of, first, *[0] * (a.ndim - 3)), sizes)

        here = None if bias is None else pick(bias)
        keys, values = pick(k, start, size), pick(v, start, size)
        return attend(pick(split)[0], keys, values, here, 0, size=size)

    out, lse = jax.lax.map(one, jnp.arange(batch * kv_heads))  # [B*K,1,T,G,H]
    out = out.reshape(batch, kv_heads, queries, group, -1).transpose(0, 2, 1, 3, 4)
    lse = lse.reshape(batch, kv_heads, queries, group).transpose(0, 2, 1, 3)
    return Partial(out.reshape(batch, queries, heads, -1), lse.reshape(batch, queries, heads))


def argmax(logits: Float32[Array, "B V"]) -> tuple[Int32[Array, " B"], Float32[Array, " B"]]:
    """The first index of each row's maximum, and the maximum; the same on all platforms.

    A row with a NaN has the maximum NaN and the last index.
    Two reductions take a fifth of the time of XLA:CPU's argmax, which was a tenth of a decode step
    of 64 sequences. The figures were not recorded.
    """
    # Without the barrier the logits may be recomputed with other bits, which equal no maximum.
    logits = jax.lax.optimization_barrier(logits)
    best, last = jnp.max(logits, axis=-1), logits.shape[-1] - 1
    place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.min(jnp.where(logits == best[:, None], place, last), axis=-1), best
