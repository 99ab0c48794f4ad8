"""Attention of one query per head over sampled slots of a cache, on any platform.

In MagicPIG (2410.16179) a sample contains the keys that share hash buckets with the query. The log
weight of a key is minus the log of its sampling probability, so the sample estimates attention over
all keys. Gathered keys and values are never written back to memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.pallas_kernels import host_memory, triton
from jaxkv.pallas_kernels.online_softmax import AttentionOutput
from jaxkv.pallas_kernels.sampled_attention import dense, reference
from jaxkv.pallas_kernels.sampled_attention.reference import (
    Angles,
    LogitSettings,
    Weight,
)

AttentionKernel = Literal["xla", "dense", "pallas_tpu", "pallas_gpu"]


def sampled_attention(
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    count: Array,
    weight: Weight = None,
    *,
    settings: LogitSettings,
    implementation: AttentionKernel | None = None,
) -> AttentionOutput:
    """Softmax attention of q [B,N,H] over sampled slots of k, v [B,K,S,H].

    slots [B,N,M] int32: the sample is its first count [B,N] entries, distinct within a head. Later
    entries are ignored. Query heads n*G .. n*G+G-1 share KV head n. A logit is
    softcap(scale x q.k) + weight. weight: log weights [B,N,M] float32; Angles, from which
    `settings.weight_fn` computes log weights; or None. k and v may be in half precision. The rest
    is in float32, but matrix units convert q to the dtype of k.

    implementation: None chooses for the platform and shape, on a TPU `dense` where
    `tpu.dense_is_cheaper` expects so. A name raises ValueError where it is unsupported. q, k, v and
    log weights have gradients, computed by XLA with all M slots gathered. Through
    `settings.weight_fn` there is no gradient.
    """
    if isinstance(weight, Angles) != (settings.weight_fn is not None):
        raise ValueError("Angles and settings.weight_fn go together: give both or neither")
    slots = jnp.clip(slots.astype(jnp.int32), 0, np.int32(k.shape[2] - 1))
    count = jnp.clip(count.astype(jnp.int32), 0, np.int32(slots.shape[-1]))
    return _attend(settings, implementation, q, k, v, slots, count, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    settings: LogitSettings, implementation: AttentionKernel | None, *args
) -> AttentionOutput:
    from jaxkv.pallas_kernels.sampled_attention import gpu, tpu  # Pallas takes a quarter second

    q, k, _, slots = args[:4]
    group, shape = q.shape[1] // k.shape[1], f"{slots.shape[-1]} of {k.shape[2]} slots"
    kernels: dict[str, Callable] = {"xla": reference.attend}
    if host_memory.on_host(k):  # only sampled slots move to the device
        implementation = implementation or "xla"
    else:
        kernels["dense"] = dense.attend
        if tpu.supports(k, slots.shape[-1]):
            kernels["pallas_tpu"] = tpu.attend
        if gpu.supports(k):
            kernels["pallas_gpu"] = gpu.attend
    kernels = {name: partial(kernel, settings) for name, kernel in kernels.items()}
    if implementation is None:
        has_triton = triton.is_supported()
        reads_all = tpu.dense_is_cheaper(slots.shape[-1], group, *k.shape[2:], k.dtype.itemsize)
        return jax.lax.platform_dependent(
            *args,
            cpu=kernels["xla"],
            tpu=kernels["dense" if reads_all or "pallas_tpu" not in kernels else "pallas_tpu"],
            cuda=kernels["pallas_gpu" if has_triton and "pallas_gpu" in kernels else "dense"],
            default=kernels["dense"],
        )
    if implementation in kernels:
        return kernels[implementation](*args)
    raise ValueError(
        f"attention over {shape} of head dim {k.shape[3]}, {k.dtype}, is supported by "
        f"{', '.join(kernels)}, got {implementation!r}; leave it out to choose by platform"
    )


def _forward(
    settings: LogitSettings, implementation: AttentionKernel | None, *args
) -> tuple[AttentionOutput, tuple]:
    return _attend(settings, implementation, *args), args


def _backward(
    settings: LogitSettings, _: AttentionKernel | None, args: tuple, cotangent: AttentionOutput
) -> tuple:
    q, k, v, slots, count, weight = args
    again = lambda q, k, v, weight: reference.gathered(settings, q, k, v, slots, count, weight)
    _, pull = jax.vjp(again, q, k, v, weight)
    dq, dk, dv, dweight = pull(cotangent)
    return dq, dk, dv, None, None, dweight


_attend.defvjp(_forward, _backward)
