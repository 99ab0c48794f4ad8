"""The same by attention over all keys: what is fastest where rows are dear and bandwidth is not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.pallas_kernels.sampled_attention.reference import (
    Angles,
    Array,
    Attended,
    How,
    Weight,
    absorb,
    finish,
    logits,
    nothing,
    places,
    there,
)


def attend(
    how: How, q: Array, k: Array, v: Array, rows: Array, count: Array, weight: Weight
) -> Attended:
    """`reference.attend`, with the weights scattered to a bias of every slot.

    The rows of a head are meant to differ; one that stands c times counts c times, with the
    largest of its weights.
    """
    batch, heads, head_dim = q.shape
    kv_heads, slots = k.shape[1:3]
    grouped = lambda a: a.reshape(batch * kv_heads, heads // kv_heads, *a.shape[2:])  # noqa: E731
    flat = lambda a: a.reshape(batch * kv_heads, *a.shape[2:])  # noqa: E731
    at = places(jnp.where(there(rows, count), rows, np.int32(slots)), heads)
    each = jnp.zeros((batch, heads, slots), jnp.float32)
    bias = jnp.log(each.at[at].add(np.float32(1), mode="drop"))
    if isinstance(weight, Angles):
        weight = Angles(
            flat(weight.norms)[:, None],
            grouped(weight.shift)[..., None],
            grouped(weight.length)[..., None],
        )
    elif weight is not None:
        weight = grouped((each - jnp.inf).at[at].max(weight, mode="drop"))
    keys, values = flat(k), flat(v)
    product = dot(grouped(q), keys, contract=(2, 2))
    bias = grouped(bias)
    # Where a row is not of the sample its weight, whatever it came to, does not matter.
    found = jnp.where(bias == -jnp.inf, -jnp.inf, logits(how, product, weight) + bias)
    none = nothing((*found.shape[:2], head_dim))
    out, lse = finish(absorb(none, found, lambda share: dot(share, values, contract=(2, 1))))
    return Attended(out.reshape(q.shape), lse.reshape(q.shape[:2]))


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Batched product over the first axis, in the type of b, accumulated in float32."""
    return jax.lax.dot_general(
        a.astype(b.dtype), b, (((contract[0],), (contract[1],)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
