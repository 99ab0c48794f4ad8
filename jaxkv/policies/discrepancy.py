"""Discrepancy: halve a block of tokens so that one half, counted twice, attends like the whole.

BalanceKV (2502.07861, section 3): a self-balancing walk over the vectors phi(k) (x) v, whose inner
products are exp(<k,k'>/sqrt d) <v,v'>, gives each token a sign, and the tokens of one sign stay
(the paper keeps the smaller class). Modes:

walk    one sign per token (Algorithm 2). If one sign has more than half of the tokens, randomly
        chosen ones of them change sides.
pairs   one sign per pair of neighbours, for the difference of their vectors (kernel halving).
coin    one fair coin per pair of neighbours: stratified sampling, the baseline that ignores the
        data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError, check_choice
from jaxkv.pallas_kernels.sign_walk import NO_STEP, balance_walk
from jaxkv.typing import Array, Bool, Float, Float32, Int32

MODES = ("walk", "pairs", "coin")


@dataclass(frozen=True)
class Halving:
    """The settings of a halving.

    key_scale: multiplies the inner products of keys; at 1 the vectors of real keys are almost
    orthogonal, so nothing can be balanced. c: a step takes +1 with probability 1/2 - s/(2c), where
    s is the inner product with the signed sum so far, scaled so that no vector is longer than 1; at
    0 only the first sign is random. tau: added to <v,v'>, for values no longer than 1, so that one
    half serves numerator and denominator.
    """

    mode: Literal["walk", "pairs", "coin"] = "pairs"
    key_scale: float = 0.1
    c: float = 0.25
    tau: float = 1.0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        if not 0 < self.key_scale < math.inf:
            raise UserError(
                f"key_scale must be above 0 and finite, got {self.key_scale}; try key_scale=0.1"
            )
        for name, value in (("c", self.c), ("tau", self.tau)):
            if not 0 <= value < math.inf:
                raise UserError(f"{name} must be 0 or more and finite, got {value}; leave it out")
        unread = {"key_scale": self.key_scale, "c": self.c, "tau": self.tau}
        for name, value in unread.items() if self.mode == "coin" else ():
            if value != getattr(Halving, name):
                raise UserError(f"mode=coin reads no keys, so not {name}={value:g}; leave it out")


class Halved(NamedTuple):
    """chosen [...,b/2]: the places that stay, in order, then places without a token.

    inner: s / (2c) at each step; outside -1/2 to 1/2 no draw could change the sign. s itself where
    c is 0.
    """

    chosen: Int32[Array, "... C"]
    inner: Float32[Array, "... W"]


def halve(
    halving: Halving,
    scale: float,
    keys: Float[Array, "... S H"],
    values: Float[Array, "... S X"],
    uniforms: Float32[Array, "... S"],
    count: Int32[Array, "..."] | None = None,
) -> Halved:
    """Half of the tokens of each block.

    scale: factor on the model's logits. uniforms: draws in [0, 1), one per token; pairs use every
    second one.
    count: the number of tokens of a block, even, at its front; None: all.
    """
    tokens = keys.shape[-2]
    if tokens % 2:
        raise UserError(f"a block must be even to be halved, got {tokens} tokens; give one more")
    count = jnp.full(uniforms.shape[:-1], tokens, jnp.int32) if count is None else count
    place = jax.lax.broadcasted_iota(jnp.int32, uniforms.shape, uniforms.ndim - 1)
    valid = place < count[..., None]
    if halving.mode == "walk":
        inner, signs = walk(halving, scale, keys, values, uniforms, valid)
        return Halved(_half(signs, uniforms, count), inner)
    first, valid = place[..., ::2], valid[..., ::2]
    thresholds = np.float32(0.5) - uniforms[..., ::2]
    if halving.mode == "coin":
        inner, stays = jnp.zeros_like(thresholds), thresholds > 0
    else:
        apart = lambda a: jnp.stack([a[..., ::2, :], a[..., 1::2, :]], axis=-3)
        inner, signs = _walk(halving, scale, apart(keys), apart(values), uniforms[..., ::2], valid)
        stays = signs > 0
    return Halved(first + jnp.where(stays, np.int32(0), np.int32(1)), inner)


def walk(
    halving: Halving,
    scale: float,
    keys: Float[Array, "... S H"],
    values: Float[Array, "... S X"],
    uniforms: Float32[Array, "... S"],
    valid: Bool[Array, "... S"],
) -> tuple[Float32[Array, "... S"], Int32[Array, "... S"]]:
    """`Halved.inner` at each token, and its sign; 0 where there is no token."""
    alone = lambda a: a[..., None, :, :]
    return _walk(halving, scale, alone(keys), alone(values), uniforms, valid)


def _walk(
    halving: Halving, scale: float, keys: Array, values: Array, uniforms: Array, valid: Array
) -> tuple[Array, Array]:
    """A walk over steps of P tokens; keys and values [...,P,b,*]."""
    keys, values = jax.lax.stop_gradient((keys, values))  # a choice has no gradient
    real = valid[..., None, :, None]
    keys, values = (jnp.where(real, a, 0).astype(jnp.float32) for a in (keys, values))
    # A softmax ignores a shift common to all keys, so keys are centred to shorten the vectors.
    members = jnp.sum(valid, axis=-1, dtype=jnp.int32)[..., None, None, None] * keys.shape[-3]
    total = jnp.sum(keys, axis=(-3, -2), keepdims=True)
    keys = keys - total / jnp.maximum(members, 1).astype(jnp.float32)
    keys = jnp.where(real, keys * np.float32((halving.key_scale * abs(scale)) ** 0.5), 0)
    # No exponent exceeds that of the longest key with itself (Cauchy-Schwarz).
    shift = jnp.max(jnp.sum(keys * keys, axis=-1), axis=(-2, -1))
    longest = jnp.max(jnp.sum(values * values, axis=-1), axis=(-2, -1), keepdims=True)[..., None]
    values = values * jax.lax.rsqrt(jnp.maximum(longest, np.float32(1e-30)))
    lengths = jnp.where(valid, _lengths(halving, keys, values, shift), 0)
    # Two equal tokens leave nothing to balance: with either sign the half is exact.
    gain = 1 / jnp.maximum(jnp.max(lengths, axis=-1), np.float32(1e-30))
    thresholds = np.float32(0.5) - uniforms
    if halving.c == 0:  # the sign of s decides; a coin where it is 0, as at the first step
        thresholds = jnp.sign(thresholds) * np.finfo(np.float32).tiny
    else:
        gain = gain / np.float32(2 * halving.c)
    thresholds = jnp.where(valid, thresholds, NO_STEP)
    done = balance_walk(keys, values, thresholds, shift, gain, halving.tau)
    return done.inner, done.signs.astype(jnp.int32)


def _lengths(halving: Halving, keys: Array, values: Array, shift: Array) -> Float32[Array, "... W"]:
    """The squared length of each step's vector."""

    def inner(p: int, q: int) -> Array:
        kernel = jnp.exp(jnp.sum(keys[..., p, :, :] * keys[..., q, :, :], -1) - shift[..., None])
        return kernel * (jnp.sum(values[..., p, :, :] * values[..., q, :, :], -1) + halving.tau)

    if keys.shape[-3] == 1:
        return inner(0, 0)
    return inner(0, 0) + inner(1, 1) - 2 * inner(0, 1)


def _half(signs: Array, uniforms: Array, count: Int32[Array, "..."]) -> Int32[Array, "... C"]:
    """Half of the tokens: those of sign +1, completed or cut at random."""
    # The last bits of a draw are independent of the sign that its first bits gave.
    order = (uniforms * np.float32(4096)) % 1 + jnp.where(signs > 0, 0, jnp.where(signs < 0, 1, 2))
    half = signs.shape[-1] // 2
    first = jnp.argsort(order, axis=-1, stable=True)[..., :half]
    place = jax.lax.broadcasted_iota(jnp.int32, first.shape, first.ndim - 1)
    # In order; places without a token come last.
    places = jnp.where(place < (count // 2)[..., None], first, signs.shape[-1])
    return jnp.minimum(jnp.sort(places, axis=-1), signs.shape[-1] - 1).astype(jnp.int32)
