"""Attention of one query a head over some rows of a cache, on what the arrays lie on.

The rows are what a draw has chosen (MagicPIG, 2410.16179: keys that share the query's buckets), and
each brings a log weight, less the logarithm of its chance, that makes the sample stand for all.
Rows that were gathered are never written back to memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.pallas_kernels import host, triton
from jaxkv.pallas_kernels.sampled_attention import dense, gpu, reference, tpu
from jaxkv.pallas_kernels.sampled_attention.reference import Angles, Attended, How, Weight

Array = jax.Array
Implementation = Literal["xla", "dense", "pallas_tpu", "pallas_gpu"]


def sampled_attention(
    q: Array,
    k: Array,
    v: Array,
    rows: Array,
    count: Array,
    weight: Weight = None,
    *,
    how: How,
    implementation: Implementation | None = None,
) -> Attended:
    """Softmax attention of q [B,N,H] over the first count [B,N] of rows [B,N,M] of k, v [B,K,S,H].

    Query heads n*G .. n*G+G-1 share kv head n. A logit is softcap(scale x q.k) + weight, which is
    log weights [B,N,M] float32; or Angles, with which `how.weigh` makes them of cosines; or None.
    rows int32: those of a head differ, and what stands behind the first `count` may be anything.
    k and v may be in half precision; the rest is in float32, though q is brought to their type
    where a product is made by a matrix unit.

    implementation: None takes what the platform has for this shape: on a TPU `dense` where
    `tpu.dense_is_cheaper` says so; a name raises ValueError where it has none. Gradients go to q,
    k, v and log weights, by XLA and with all M rows gathered; none goes through `how.weigh`.
    """
    if isinstance(weight, Angles) != (how.weigh is not None):
        raise ValueError("Angles and how.weigh go together: give both or neither")
    rows = jnp.clip(rows.astype(jnp.int32), 0, np.int32(k.shape[2] - 1))
    count = jnp.clip(count.astype(jnp.int32), 0, np.int32(rows.shape[-1]))
    return _attend(how, implementation, q, k, v, rows, count, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(how: How, implementation: Implementation | None, *given) -> Attended:
    q, k, _, rows = given[:4]
    group, shape = q.shape[1] // k.shape[1], f"{rows.shape[-1]} of {k.shape[2]} rows"
    kernels: dict[str, Callable] = {"xla": reference.attend}
    if host.is_there(k):  # of which only rows are brought to the device
        implementation = implementation or "xla"
    else:
        kernels["dense"] = dense.attend
        if tpu.takes(k, rows.shape[-1]):
            kernels["pallas_tpu"] = tpu.attend
        if gpu.takes(k):
            kernels["pallas_gpu"] = gpu.attend
    kernels = {name: partial(kernel, how) for name, kernel in kernels.items()}
    if implementation is None:
        copies = rows.shape[-1], group
        whole = tpu.dense_is_cheaper(*copies, *k.shape[2:], k.dtype.itemsize)
        return jax.lax.platform_dependent(
            *given,
            cpu=kernels["xla"],
            tpu=kernels["dense" if whole or "pallas_tpu" not in kernels else "pallas_tpu"],
            cuda=kernels["pallas_gpu" if triton.runs() and "pallas_gpu" in kernels else "dense"],
            default=kernels["dense"],
        )
    if implementation in kernels:
        return kernels[implementation](*given)
    raise ValueError(
        f"attention over {shape} of {k.shape[3]} numbers, {k.dtype}, is done by "
        f"{', '.join(kernels)}, got {implementation!r}; leave it out for what the platform has"
    )


def _forward(how: How, implementation: Implementation | None, *given) -> tuple[Attended, tuple]:
    return _attend(how, implementation, *given), given


def _backward(how: How, _: Implementation | None, given: tuple, cotangent: Attended) -> tuple:
    q, k, v, rows, count, weight = given
    again = lambda q, k, v, weight: reference.gathered(how, q, k, v, rows, count, weight)  # noqa: E731
    _, pull = jax.vjp(again, q, k, v, weight)
    of_q, of_k, of_v, of_weight = pull(cotangent)
    return of_q, of_k, of_v, None, None, of_weight


_attend.defvjp(_forward, _backward)
