"""The definition of the kernels, in XLA.

The state of a walk is one number s per step. Each chosen sign adds its row of the Gram matrix to
all of them. Every s_j is summed element by element in the order of the steps, and a product with a
sign is exact. So the signs are a function of the bits of `gram` and `thresholds`, on every backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

NO_STEP = np.float32(2)  # the threshold of an absent step; others are 1/2 minus a uniform draw


def walk(gram: Array, thresholds: Array) -> tuple[Array, Array]:
    """M walks of b steps: signs [M,b] float32, and the inner product s_i [M,b] at each step.

    gram [M,b,b] float32, symmetric. thresholds [M,b] float32. Step i takes +1 where
    s_i < thresholds_i, else -1, or 0 where the threshold is NO_STEP; then s += sign x gram[i].
    """

    def take_step(s: Array, step: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        i, row, threshold = step
        inner = jax.lax.dynamic_index_in_dim(s, i, 1, keepdims=False)
        sign = sign_of(inner, threshold)
        return s + sign[:, None] * row, (sign, inner)

    steps = gram.shape[1]
    start = jnp.zeros(gram.shape[::2], jnp.float32)
    rows = (jnp.arange(steps), gram.transpose(1, 0, 2), thresholds.T)
    _, (signs, inner) = jax.lax.scan(take_step, start, rows)
    return signs.T, inner.T


def sign_of(inner: Array, threshold: Array) -> Array:
    """The sign of a step, for all implementations."""
    sign = jnp.where(inner < threshold, jnp.ones_like(inner), jnp.full_like(inner, -1.0))
    return jnp.where(threshold < NO_STEP, sign, jnp.zeros_like(inner))


def gram(keys: Array, values: Array, shift: Array, gain: Array, tau: float) -> Array:
    """Gram matrices [M,b,b] of keys [M,P,b,d], values [M,P,b,d'], shift and gain [M].

    P = 1: gain x exp(<k_i,k_j> - shift) (<v_i,v_j> + tau). P = 2: a step is the difference of two
    tokens, so the entry is the sum over equal members minus the two cross products.
    """
    per_walk = lambda x: x[:, None, None]
    return signed_sum(
        lambda p, q: (
            jnp.exp(_dot(keys[:, p], keys[:, q]) - per_walk(shift))
            * (_dot(values[:, p], values[:, q]) + np.float32(tau))
        ),
        keys.shape[1],
    ) * per_walk(gain)


def signed_sum(part, members: int) -> Array:
    """The sum over members p, q of two steps: +part(p, q) where p = q, else -part(p, q)."""
    total = part(0, 0)
    for p in range(members):
        for q in range(members):
            if (p, q) != (0, 0):
                total = total + part(p, q) if p == q else total - part(p, q)
    return total


def _dot(x: Array, y: Array) -> Array:
    return jax.lax.dot_general(
        x,
        y,
        (((2,), (2,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def balance(
    keys: Array, values: Array, thresholds: Array, shift: Array, gain: Array, tau: float
) -> tuple[Array, Array]:
    """`walk` over the Gram matrices of tokens."""
    return walk(gram(keys, values, shift, gain, tau), thresholds)
