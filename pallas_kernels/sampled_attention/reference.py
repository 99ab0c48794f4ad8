"""The definition of the kernels, in XLA, and the arithmetic that all implementations share.

Axis letters: B batch entries, N query heads, K KV heads, S slots, H head dim, M sampled slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.pallas_kernels import host_memory
from jaxkv.pallas_kernels.online_softmax import (
    AttentionOutput,
    Sums,
    accumulate,
    empty_sums,
    normalize,
)

# Sampled slots that `attend` gathers at a time. All at once, a head with few sampled slots would
# take as long as a full one; in smaller blocks the loop costs more.
# Measured in evals/results/workarounds.json, rows gathered_slots and gathered_slots-128.
GATHERED_SLOTS = 256


class LogitSettings(NamedTuple):
    """Static settings of a logit, softcap(scale x q.k) + log weight.

    weight_fn: the log weight as a function of the cosine of q and the centred key, elementwise on
    float32. It is hashable, so a frozen dataclass with __call__, and uses operations that kernels
    support. TPU kernels support exp, log, log1p, sqrt and tanh, but not expm1, sign or acos.
    """

    scale: float
    softcap: float | None = None
    weight_fn: Callable[[Array], Array] | None = None


class Angles(NamedTuple):
    """The terms of the cosine of q and k - m, where m is the mean key: (q.k - q.m) / (|q| |k - m|).

    norms [B,K,S]: |k - m|. shift [B,N]: q.m. length [B,N]: |q|. All float32.
    """

    norms: Array
    shift: Array
    length: Array


Weight = Array | Angles | None  # log weights [B,N,M], their terms, or none


def attend(
    settings: LogitSettings,
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    count: Array,
    weight: Weight,
) -> AttentionOutput:
    """One head after another, in blocks of slots; a head with a smaller count has fewer blocks.

    The arguments are those of `sampled_attention`, slots within 0 .. S-1 and counts within 0 .. M.
    The bits of a head depend on its own inputs only.
    """
    kv_heads, num_slots, head_dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    block = min(GATHERED_SLOTS, slots.shape[-1])
    slots = flatten_heads(pad_sample(slots, block))
    keys, values = k.reshape(-1, head_dim), v.reshape(-1, head_dim)
    angles = isinstance(weight, Angles)
    norms = weight.norms.reshape(-1) if angles else None
    if weight is not None:
        weight = weight._replace(norms=None) if angles else pad_sample(weight, block)
        weight = jax.tree.map(flatten_heads, weight)

    def attend_head(args: tuple[Array, Array, Array, Array, Weight]) -> tuple[Array, Array]:
        head, q, slots, count, weight = args
        first = head // group * num_slots

        def attend_block(i: Array, so_far: Sums) -> Sums:
            cut = lambda a: jax.lax.dynamic_slice_in_dim(a, i * block, block)
            within = i * block + jnp.arange(block) < count
            at = first + jnp.where(within, cut(slots), 0)  # a repeated slot is in the cache
            take = partial(host_memory.take, at=at)
            product = dot(take(keys), q)
            block_weight = weight
            if weight is not None:
                block_weight = weight._replace(norms=take(norms)) if angles else cut(weight)
            block_logits = logits(settings, product, block_weight)
            block_logits = jnp.where(within, block_logits, -jnp.inf)
            return accumulate(so_far, block_logits, lambda share: dot(share, take(values)))

        blocks = -(-count // block)
        sums = jax.lax.fori_loop(0, blocks, attend_block, empty_sums((head_dim,)))
        out, lse = normalize(sums)
        return out, lse[0]

    # vmap over heads would run all heads until the last one is done, and copy all sums per block.
    heads = q.shape[0] * q.shape[1]
    args = (
        jnp.arange(heads),
        flatten_heads(q.astype(jnp.float32)),
        slots,
        flatten_heads(count),
        weight,
    )
    out, lse = jax.lax.map(attend_head, args)
    return AttentionOutput(out.reshape(q.shape), lse.reshape(q.shape[:2]))


def gathered(
    settings: LogitSettings,
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    count: Array,
    weight: Weight,
) -> AttentionOutput:
    """The same with all slots gathered at once, M x H numbers per head; gradients use this form.

    A weight from `settings.weight_fn` is the probability of a draw, so it has no gradient.
    """
    at = cache_index(slots, k.shape[1])
    product = jnp.einsum(
        "bnh,bnmh->bnm", q.astype(jnp.float32), k[at].astype(jnp.float32), precision="highest"
    )
    if isinstance(weight, Angles):
        angles = Angles(weight.norms[at], weight.shift[..., None], weight.length[..., None])
        weight = jax.lax.stop_gradient(settings.weight_fn(cosine(product, angles)))
    sample_logits = logits(settings, product, weight)
    sample_logits = jnp.where(in_sample(slots, count), sample_logits, -jnp.inf)
    values = v[at].astype(jnp.float32)
    apply = lambda share: jnp.einsum("bnm,bnmh->bnh", share, values, precision="highest")
    out, lse = normalize(accumulate(empty_sums(q.shape), sample_logits, apply))
    return AttentionOutput(out, lse[..., 0])


def logits(settings: LogitSettings, product: Array, weight: Weight) -> Array:
    """softcap(scale x product) + weight; Angles have the shapes of these products."""
    capped = product * np.float32(settings.scale)
    if settings.softcap is not None:
        capped = np.float32(settings.softcap) * jnp.tanh(capped / np.float32(settings.softcap))
    if weight is None:
        return capped
    if isinstance(weight, Angles):
        weight = settings.weight_fn(cosine(product, weight))
    return capped + weight


def cosine(product: Array, angles: Angles) -> Array:
    """The cosine within -1 .. 1; 0 where the query or the centred key is zero."""
    size = angles.norms * angles.length
    zero = size <= 0
    ratio = (product - angles.shift) / jnp.where(zero, np.float32(1), size)
    return jnp.where(zero, np.float32(0), jnp.clip(ratio, np.float32(-1), np.float32(1)))


def dot(x: Array, y: Array) -> Array:
    """The product over the last axis of x and the first of y, in float32."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.dot(x, y, precision=jax.lax.Precision.HIGHEST)


def in_sample(slots: Array, count: Array) -> Array:
    """[B,N,M]: whether each entry is among the first `count`."""
    return jax.lax.broadcasted_iota(jnp.int32, slots.shape, 2) < count[..., None]


def cache_index(slots: Array, kv_heads: int) -> tuple[np.ndarray, np.ndarray, Array]:
    """The index of slots [B,N,M] into an array [B,K,S,...]."""
    batch, heads = slots.shape[:2]
    entry, head, _ = np.ogrid[:batch, :heads, :1]
    return entry, head // (heads // kv_heads), slots


def flatten_heads(array: Array) -> Array:
    """[B,N,...] as [B*N,...]."""
    return array.reshape(-1, *array.shape[2:])


def pad_sample(array: Array, multiple: int) -> Array:
    """[B,N,M], padded with zeros until M is a multiple."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[-1] % multiple)))
