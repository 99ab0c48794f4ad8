"""The softmax over keys that are read block by block: sums that every kernel of attention keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class AttentionOutput(NamedTuple):
    """out [...,H], lse [...], both float32. Where no key is in view: out 0, lse -inf."""

    out: Array
    lse: Array


class Sums(NamedTuple):
    """An online softmax: the largest logit, and sums of exponentials relative to it."""

    top: Array
    total: Array
    out: Array


def empty_sums(shape: tuple[int, ...]) -> Sums:
    """Sums of no logits, for outputs of this shape."""
    number = jnp.zeros((*shape[:-1], 1), jnp.float32)
    return Sums(jnp.full_like(number, -np.inf), number, jnp.zeros(shape, jnp.float32))


def accumulate(so_far: Sums, new: Array, apply: Callable[[Array], Array]) -> Sums:
    """The sums with new logits [...,M]. apply: multiplies their exponentials with the values."""
    # Any maximum gives the same result, so it needs no gradient.
    new_top = jax.lax.stop_gradient(jnp.max(new, axis=-1, keepdims=True))
    top = jnp.maximum(so_far.top, new_top)
    # Without a key in view it is -inf; a finite value keeps the exponentials at 0, not NaN.
    safe = jnp.where(top == -jnp.inf, np.float32(0), top)
    old, share = jnp.exp(so_far.top - safe), jnp.exp(new - safe)
    total = so_far.total * old + jnp.sum(share, axis=-1, keepdims=True)
    return Sums(top, total, so_far.out * old + apply(share))


def normalize(sums: Sums) -> tuple[Array, Array]:
    """out and lse; the last axis of lse has one element."""
    empty = sums.total == 0
    safe = jnp.where(empty, np.float32(1), sums.total)
    return sums.out / safe, jnp.where(empty, np.float32(-np.inf), sums.top + jnp.log(safe))


def merge(out: Array, lse: Array, axis: int) -> tuple[Array, Array]:
    """out [...,H] and lse [...,1] of disjoint sets of keys, which lie along an axis, as one."""
    top = jnp.max(lse, axis=axis, keepdims=True)
    share = jnp.exp(lse - jnp.where(top == -jnp.inf, np.float32(0), top))
    total, out = jnp.sum(share, axis=axis), jnp.sum(share * out, axis=axis)
    return normalize(Sums(jnp.squeeze(top, axis), total, out))
