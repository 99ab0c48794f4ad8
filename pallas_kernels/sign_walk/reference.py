"""What the kernels compute, in XLA.

The walk is in push form: a state s of one number a step, to which every sign adds its row of the
Gram matrix. Each s_j is a sum taken element by element in the order of the steps, a product with
a sign is exact, and nothing is computed in the comparison: so the signs are a function of the bits
of `gram` and `thresholds` alone, on every backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
NO_STEP = np.float32(2)  # a threshold is 1/2 less a chance; this one says that nothing is there


def walk(gram: Array, thresholds: Array) -> tuple[Array, Array]:
    """Signs [M,b] float32 of M walks of b steps, and s_i [M,b] as each step met it.

    gram [M,b,b] float32, symmetric. thresholds [M,b] float32. Step i takes +1 where
    s_i < thresholds_i, else -1, or 0 where the threshold is NO_STEP; then s += sign x gram[i].
    """

    def one(s: Array, step: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        i, row, threshold = step
        met = jax.lax.dynamic_index_in_dim(s, i, 1, keepdims=False)
        sign = sign_of(met, threshold)
        return s + sign[:, None] * row, (sign, met)

    steps = gram.shape[1]
    start = jnp.zeros(gram.shape[::2], jnp.float32)
    rows = (jnp.arange(steps), gram.transpose(1, 0, 2), thresholds.T)
    _, (signs, met) = jax.lax.scan(one, start, rows)
    return signs.T, met.T


def sign_of(met: Array, threshold: Array) -> Array:
    """The comparison, for all who walk."""
    sign = jnp.where(met < threshold, jnp.ones_like(met), -jnp.ones_like(met))
    return jnp.where(threshold < NO_STEP, sign, jnp.zeros_like(met))


def gram(keys: Array, values: Array, shift: Array, gain: Array, tau: float) -> Array:
    """[M,b,b] of keys [M,P,b,d], values [M,P,b,d'], shift and gain [M].

    P is 1: gain x exp(<k_i,k_j> - shift) (<v_i,v_j> + tau). P is 2, steps that are the difference
    of two tokens: the same of both, less the two products of one with the other.
    """
    each = lambda x: x[:, None, None]  # noqa: E731
    return signed_sum(
        lambda p, q: (
            jnp.exp(_dot(keys[:, p], keys[:, q]) - each(shift))
            * (_dot(values[:, p], values[:, q]) + np.float32(tau))
        ),
        keys.shape[1],
    ) * each(gain)


def signed_sum(part, members: int) -> Array:
    """Of the members p, q of two steps: part(p, q), added where they are alike, else taken off."""
    total = part(0, 0)
    for p in range(members):
        for q in range(members):
            if (p, q) != (0, 0):
                total = total + part(p, q) if p == q else total - part(p, q)
    return total


def _dot(x: Array, y: Array) -> Array:
    return jax.lax.dot_general(
        x, y, (((2,), (2,)), ((0,), (0,))), precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def balance(
    keys: Array, values: Array, thresholds: Array, shift: Array, gain: Array, tau: float
) -> tuple[Array, Array]:
    """`walk` over the Gram matrices of tokens."""
    return walk(gram(keys, values, shift, gain, tau), thresholds)
