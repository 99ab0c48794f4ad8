"""Exact attention of a chunk of queries to several sets of keys, on any platform.

A bounded cache reads a chunk against its sinks, its ring and the chunk itself, each with another
mask and sinks with another rotation. One kernel reads all of them by an online softmax
(FlashAttention, arXiv 2205.14135), so neither logits nor masks lie in memory and nothing is merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.pallas_kernels.flash_attention import reference
from jaxkv.pallas_kernels.flash_attention.reference import ARRAYS, KeySet
from jaxkv.pallas_kernels.online_softmax import AttentionOutput
from jaxkv.pallas_kernels.timing import KERNEL

FlashKernel = Literal["xla", "pallas_gpu", "pallas_tpu"]


def flash_attention(
    sets: Sequence[KeySet],
    scale: float,
    softcap: float | None = None,
    implementation: FlashKernel | None = None,
) -> AttentionOutput:
    """Softmax attention over the keys of all sets together; query head n*G+g has KV head n.

    A logit is softcap(scale x q.k) + log weight. Products have the dtype of the keys and are
    accumulated in float32. A kernel rounds the output, and not the log-sum-exp, to the dtype of q.

    implementation: None chooses for the platform. A name raises ValueError where it is unsupported.
    q, k and v have gradients, computed by XLA with all logits in memory.
    """
    return _attend(scale, softcap, implementation, tuple(sets))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(
    scale: float,
    softcap: float | None,
    implementation: FlashKernel | None,
    sets: tuple[KeySet, ...],
) -> AttentionOutput:
    k = sets[0].k
    if implementation is None:
        platform = jax.default_backend()
        implementation = "xla" if refusal(k.shape[3], k.dtype) else KERNEL[platform]
    reason = _refusal(implementation, k.shape[3], k.dtype)
    if reason is not None:
        raise ValueError(
            f"flash attention cannot be computed by {implementation!r}: {reason}; leave it out to "
            "choose by platform"
        )
    return _module(implementation).attend(sets, scale, softcap)


def refusal(head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why no kernel of the default backend reads this head dim and dtype; None if one does."""
    platform = jax.default_backend()
    if platform not in KERNEL:
        return f"there is no kernel for {platform}"
    return _refusal(KERNEL[platform], head_dim, dtype)


def _refusal(name: str, head_dim: int, dtype: jnp.dtype) -> str | None:
    if name == "xla":
        return None
    if name not in KERNEL.values():
        return f"the names are xla, {', '.join(KERNEL.values())}"
    return _module(name).refusal(head_dim, dtype)


def _module(name: str) -> ModuleType:
    if name == "xla":
        return reference
    from jaxkv.pallas_kernels.flash_attention import gpu, tpu  # Pallas takes a quarter second

    return {"pallas_gpu": gpu, "pallas_tpu": tpu}[name]


def _forward(
    scale: float,
    softcap: float | None,
    implementation: FlashKernel | None,
    sets: tuple[KeySet, ...],
) -> tuple[AttentionOutput, tuple[KeySet, ...]]:
    return _attend(scale, softcap, implementation, sets), sets


def _backward(
    scale: float,
    softcap: float | None,
    _: FlashKernel | None,
    sets: tuple[KeySet, ...],
    cotangent: AttentionOutput,
) -> tuple[tuple[KeySet, ...]]:
    def attend(arrays: list[tuple[Array, Array, Array]]) -> AttentionOutput:
        pairs = zip(sets, arrays, strict=True)
        replaced = [replace(keys, q=q, k=k, v=v) for keys, (q, k, v) in pairs]
        return reference.attend(replaced, scale, softcap)

    _, pull = jax.vjp(attend, [(keys.q, keys.k, keys.v) for keys in sets])
    (gradients,) = pull(cotangent)
    no_gradients = dict.fromkeys(ARRAYS[3:])
    gradients = zip(sets, gradients, strict=True)
    return (tuple(replace(keys, q=q, k=k, v=v, **no_gradients) for keys, (q, k, v) in gradients),)


_attend.defvjp(_forward, _backward)
