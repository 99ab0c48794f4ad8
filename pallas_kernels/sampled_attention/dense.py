"""The same by attention over all keys: fastest where gathers cost more than bandwidth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.pallas_kernels.online_softmax import AttentionOutput, accumulate, empty_sums, normalize
from jaxkv.pallas_kernels.sampled_attention.reference import (
    Angles,
    Array,
    LogitSettings,
    Weight,
    cache_index,
    in_sample,
    logits,
)


def attend(
    settings: LogitSettings,
    q: Array,
    k: Array,
    v: Array,
    slots: Array,
    count: Array,
    weight: Weight,
) -> AttentionOutput:
    """`reference.attend`, with the weights scattered to a bias of every slot.

    The slots of a head should be distinct. A slot that occurs c times counts c times, with the
    largest of its weights.
    """
    batch, heads, head_dim = q.shape
    kv_heads, num_slots = k.shape[1:3]
    grouped = lambda a: a.reshape(batch * kv_heads, heads // kv_heads, *a.shape[2:])
    flat = lambda a: a.reshape(batch * kv_heads, *a.shape[2:])
    at = cache_index(jnp.where(in_sample(slots, count), slots, np.int32(num_slots)), heads)
    zeros = jnp.zeros((batch, heads, num_slots), jnp.float32)
    bias = jnp.log(zeros.at[at].add(np.float32(1), mode="drop"))
    if isinstance(weight, Angles):
        weight = Angles(
            flat(weight.norms)[:, None],
            grouped(weight.shift)[..., None],
            grouped(weight.length)[..., None],
        )
    elif weight is not None:
        weight = grouped((zeros - jnp.inf).at[at].max(weight, mode="drop"))
    keys, values = flat(k), flat(v)
    product = dot(grouped(q), keys, contract=(2, 2))
    bias = grouped(bias)
    # The weight of a slot outside the sample may be anything.
    biased = jnp.where(bias == -jnp.inf, -jnp.inf, logits(settings, product, weight) + bias)
    none = empty_sums((*biased.shape[:2], head_dim))
    out, lse = normalize(
        accumulate(none, biased, lambda share: dot(share, values, contract=(2, 1)))
    )
    return AttentionOutput(out.reshape(q.shape), lse.reshape(q.shape[:2]))


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Batched product over the first axis, in the dtype of b, accumulated in float32."""
    return jax.lax.dot_general(
        a.astype(b.dtype),
        b,
        (((contract[0],), (contract[1],)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
