"""BalanceKV as its theorem has it (Han et al. 2025, 2502.07861): Algorithms 1 to 3, for one stream.

Published code does something else and so do the policies (see jaxkv/halving.py, merge_reduce.py);
this is the reference that the bound speaks of, streaming in fixed shapes. Where the paper's listing
is misprinted: a bucket holds 2^i <= |v| < 2^(i+1), a value of length 0 is in no bucket, and p of
Algorithm 3 is the number of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError, whole
from jaxkv.pallas_kernels.sign_walk import NO_STEP, balance_walk
from jaxkv.policies.discrepancy import certain
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32


class Class(NamedTuple):
    """chosen [...,n]: the smaller of the two classes. failed [...]: whether some |s| was beyond
    c R^2, or a key or value longer than its radius, where Algorithm 2 gives no answer."""

    chosen: Bool[Array, "... S"]
    failed: Bool[Array, "..."]


def softmax_balance(
    keys: Float[Array, "... S H"],
    values: Float[Array, "... S X"],
    uniforms: Float32[Array, "... S"],
    there: Bool[Array, "... S"],
    r_key: float,
    r_value: Float32[Array, "..."],
    delta: float,
    walks: float = 30.0,
    n: int | None = None,
) -> Class:
    """Algorithm 2 over the tokens that are `there`.

    r_key, r_value: radii, no key or value being longer. delta: of failure. walks: the constant of
    c = 30 log(n / delta); smaller ones lean sooner and fail more often. n: tokens; None: the slots.
    """
    slots, head_dim = keys.shape[-2:]
    n = slots if n is None else n
    c = walks * math.log(n / delta)
    # All is divided by R^2 = exp(r_key^2 / sqrt d) r_value^2, which float32 cannot always hold.
    scaled = keys.astype(jnp.float32) * np.float32(head_dim**-0.25)
    units = values.astype(jnp.float32) / r_value[..., None, None]
    shift = jnp.full(r_value.shape, r_key**2 / head_dim**0.5, jnp.float32)
    gain = jnp.full(r_value.shape, 1 / (2 * c), jnp.float32)
    thresholds = jnp.where(there, np.float32(0.5) - uniforms, NO_STEP)
    one = lambda a: a[..., None, :, :]  # noqa: E731
    walk = balance_walk(one(scaled), one(units), thresholds, shift, gain, 0.0)
    count = lambda sign: jnp.sum(walk.signs == sign, axis=-1, keepdims=True)  # noqa: E731
    chosen = walk.signs == jnp.where(count(1) <= count(-1), 1, -1).astype(jnp.int8)
    beyond = jnp.any(there & certain(walk.met), axis=-1)
    far = jnp.any(there & ~(_inside(keys, r_key) & _inside(units, 1.0)), axis=-1)
    return Class(chosen, beyond | far)


def _length(vectors: Float[Array, "... H"]) -> Float32[Array, "..."]:
    return jnp.sqrt(jnp.sum(jnp.square(vectors.astype(jnp.float32)), axis=-1))


def _inside(vectors: Float[Array, "... H"], radius: float) -> Bool[Array, "..."]:
    """Whether each is no longer than the radius, to the rounding of its length; NaN is not."""
    return _length(vectors) <= np.float32(radius * (1 + 1e-6))


class Sums(NamedTuple):
    """The estimates of numerator and denominator of each query's attention. beyond: queries longer
    than r, or of no numbers, of which the theorem says nothing."""

    numerator: Float32[Array, "T X"]
    denominator: Float32[Array, " T"]
    beyond: Bool[Array, " T"]


class Instances(NamedTuple):
    """Merge and reduce (Algorithm 3), I times: levels 0 .. T of room for 2t tokens each.

    The last is never emptied, and has room for four halves; the others hold t at most. failures:
    halvings that failed, and tokens that came to the instance and were beyond a radius, no numbers,
    or too many; with one or more of them the theorem says nothing.
    """

    k: Float32[Array, "I L S H"]
    v: Float32[Array, "I L S X"]
    there: Bool[Array, "I L S"]
    tokens: UInt32[Array, " I"]
    failures: Int32[Array, " I"]
    longest: Float32[Array, " 1"]  # value so far


@dataclass(frozen=True)
class BalanceKV:
    """Algorithm 1: one instance of merge and reduce for each power of two that values' lengths lie
    between, for the numerator, and one of ones for the denominator.

    batch: t. rounds: T. r: radius of keys and queries. epsilon: precision, by which small buckets
    are erased. lowest, buckets: the first has values of up to 2^(lowest+1); a value longer than the
    last bucket's is a failure. walks: of Algorithm 2; 30 is the theorem's.

    What fits, `most`, is the stream's length n. The paper leaves open which power of 1/n the delta
    of Algorithm 2 is. Here it is n^-3 over the dimension of values: there are no more than 4n/t
    halvings, for each token comes to two instances, and every one must serve n queries, so all do
    with a chance of 1 - 4/(nt) or more; and the proof of Algorithm 2 asks for each dimension alone.
    """

    batch: int
    rounds: int
    r: float
    epsilon: float = 0.1
    lowest: int = -8
    buckets: int = 12
    walks: float = 30.0

    def __post_init__(self) -> None:
        for name in ("batch", "buckets"):
            whole(name, getattr(self, name))
        if self.batch % 2 or self.rounds < 0 or self.batch << self.rounds > 2**30:
            raise UserError(
                "batch must be even, rounds 0 or more, and batch x 2^rounds 2^30 at most, got "
                f"batch={self.batch} and rounds={self.rounds}; try batch=256 and rounds=4"
            )
        if not (0 < self.r < math.inf and 0 < self.walks < math.inf):
            raise UserError(
                f"r and walks must be above 0 and finite, got r={self.r} and walks={self.walks}; "
                "give the length of the longest key or query, and leave walks out"
            )
        if not 0 < self.epsilon < 1:
            raise UserError(
                f"epsilon must be between 0 and 1, got {self.epsilon}; leave it out for 0.1"
            )
        # float32 must hold the squares of the lengths that buckets tell apart.
        if self.lowest < -60 or self.lowest + self.buckets > 60:
            raise UserError(
                "buckets must lie between 2^-60 and 2^60, got "
                f"lowest={self.lowest} and buckets={self.buckets}; leave them out for values of up "
                "to 2^4"
            )

    @property
    def most(self) -> int:
        """Tokens that fit: one less than bring the last level a fifth half, of which each comes
        with 2^(rounds-1) batches; without rounds all stay in level 0."""
        return 5 * (self.batch << self.rounds) // 2 - 1 if self.rounds else 2 * self.batch

    def init(self, head_dim: int, value_dim: int) -> Instances:
        sizes = self.buckets + 1, self.rounds + 1, 2 * self.batch
        return Instances(
            jnp.zeros((*sizes, head_dim), jnp.float32),
            jnp.zeros((*sizes, value_dim), jnp.float32),
            jnp.zeros(sizes, bool),
            jnp.zeros(sizes[:1], jnp.uint32),
            jnp.zeros(sizes[:1], jnp.int32),
            jnp.zeros((1,), jnp.float32),
        )

    @property
    def radii(self) -> np.ndarray:
        """Of the values of each instance."""
        exponents = self.lowest + np.arange(self.buckets, dtype=np.float32)
        return np.append(2 ** (exponents + 1), 1).astype(np.float32)

    def insert(
        self, state: Instances, k: Float[Array, " H"], v: Float[Array, " X"], key: jax.Array
    ) -> Instances:
        """One token more."""
        length = _length(v)
        exponent = jnp.floor(jnp.log2(jnp.maximum(length, np.float32(1e-30)))) - self.lowest
        last = np.float32(self.buckets - 1)
        # What is no number shows in the numerator as in the denominator.
        exponent = jnp.where(length < jnp.inf, exponent, last)
        bucket = jnp.clip(exponent, 0, last).astype(jnp.int32)
        number = jnp.arange(self.buckets + 1)
        goes = ((number == bucket) & (length != 0)) | (number == self.buckets)
        inside = _inside(k, self.r) & _inside(v, float(self.radii[-2]))
        # The denominator's values are ones: one number each, the others zero.
        ones = jnp.zeros_like(v).at[0].set(1)
        values = jnp.where((number == self.buckets)[:, None], ones[None], v[None])
        slot = state.tokens % np.uint32(self.batch) if self.rounds else state.tokens
        here = goes[:, None] & (jnp.arange(2 * self.batch, dtype=jnp.uint32)[None] == slot[:, None])

        def first(leaf: Array, new: Array) -> Array:
            return leaf.at[:, 0].set(jnp.where(here[..., None], new[:, None], leaf[:, 0]))

        state = Instances(
            k=first(state.k, jnp.broadcast_to(k[None], (len(number), len(k)))),
            v=first(state.v, values),
            there=state.there.at[:, 0].set(here | state.there[:, 0]),
            tokens=state.tokens + goes.astype(jnp.uint32),
            failures=state.failures
            + (goes & ((state.tokens >= self.most) | ~inside)).astype(jnp.int32),
            longest=jnp.where(length < jnp.inf, jnp.maximum(state.longest, length), state.longest),
        )
        state = self._erase(state)
        full = goes & (state.tokens % np.uint32(self.batch) == 0)
        batches = state.tokens // np.uint32(self.batch)
        for level in range(self.rounds):
            does = full & (batches % np.uint32(2**level) == 0)
            key = jax.random.fold_in(key, level)
            halve = partial(self._halve, level, does, batches >> np.uint32(level), key)
            state = jax.lax.cond(jnp.any(does), halve, lambda s: s, state)
        return state

    def _halve(
        self, level: int, does: Array, halvings: Array, key: jax.Array, state: Instances
    ) -> Instances:
        """The smaller class of a level, of instances that it `does`, to the next."""
        uniforms = jax.random.uniform(key, state.there.shape[::2])
        kept = softmax_balance(
            state.k[:, level], state.v[:, level], uniforms, state.there[:, level], self.r,
            jnp.asarray(self.radii), self._delta(state), self.walks, self.batch,
        )  # fmt: skip
        half = self.batch // 2
        order = jnp.argsort(~kept.chosen, axis=1, stable=True)[:, :half]
        # One half behind the other; but for the last level there are never more than two.
        place = halvings - np.uint32(1) if level + 1 == self.rounds else (halvings - 1) % 2
        slot = jnp.arange(2 * self.batch, dtype=jnp.uint32)[None]
        takes = does[:, None] & (slot // np.uint32(half) == place[:, None])

        def up(leaf: Array) -> Array:
            wide = [1] * (leaf.ndim - 3)
            new = jnp.take_along_axis(leaf[:, level], order.reshape(*order.shape, *wide), axis=1)
            new = jnp.tile(new, (1, 4, *wide))
            return leaf.at[:, level + 1].set(
                jnp.where(takes.reshape(*takes.shape, *wide), new, leaf[:, level + 1])
            )

        there = up(state.there.at[:, level].set(state.there[:, level] & kept.chosen))
        emptied = state.there[:, level] & ~does[:, None]
        return state._replace(
            k=up(state.k), v=up(state.v), there=there.at[:, level].set(emptied),
            failures=state.failures + (does & kept.failed).astype(jnp.int32),
        )  # fmt: skip

    def _delta(self, state: Instances) -> float:
        return 1 / (self.most**3 * state.v.shape[-1])

    def _erase(self, state: Instances) -> Instances:
        """Buckets whose values are too small to matter beside the longest so far."""
        head_dim = state.k.shape[-1]
        share = self.epsilon / (2 * self.most) * math.exp(-(self.r**2) / head_dim**0.5)
        small = jnp.asarray(self.radii[:-1] / 2) <= np.float32(share) * state.longest
        keep = jnp.append(~small, True)
        return state._replace(there=state.there & keep[:, None, None])

    def sums(self, state: Instances, q: Float[Array, "T H"]) -> Sums:
        logits = jnp.einsum(
            "th,ilsh->tils", q, state.k, precision=jax.lax.Precision.HIGHEST
        ) / np.float32(state.k.shape[-1] ** 0.5)
        times = 2.0 ** np.arange(self.rounds + 1, dtype=np.float32)
        weights = jnp.where(state.there[None], jnp.exp(logits), 0) * times[None, None, :, None]
        of_values = jnp.einsum(
            "tils,ilsx->tx", weights[:, :-1], state.v[:-1], precision=jax.lax.Precision.HIGHEST
        )
        return Sums(of_values, jnp.sum(weights[:, -1], axis=(1, 2)), ~_inside(q, self.r))
