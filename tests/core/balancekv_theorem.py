"""The algorithm that BalanceKV's theorem is about (Han et al. 2025, 2502.07861): Algorithms 1 to 3.

The theorem bounds the error of this algorithm. The published code and the policies differ from it
(jaxkv/policies/discrepancy.py, jaxkv/policies/merge_reduce). This code streams in fixed shapes.

The paper's listing has misprints, read here as follows: a bucket contains 2^i <= |v| < 2^(i+1), a
value of length 0 is in no bucket, and p of Algorithm 3 is the number of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError, check_int
from jaxkv.evals.balancekv.single_layer import certain
from jaxkv.pallas_kernels.sign_walk import NO_STEP, balance_walk
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32


class Class(NamedTuple):
    """The result of Algorithm 2.

    chosen [...,n]: the smaller of the two classes. failed [...]: whether some |s| exceeded c R^2,
    or a key or value exceeded its radius. Algorithm 2 gives no answer then.
    """

    chosen: Bool[Array, "... S"]
    failed: Bool[Array, "..."]


def softmax_balance(
    keys: Float[Array, "... S H"],
    values: Float[Array, "... S X"],
    uniforms: Float32[Array, "... S"],
    valid: Bool[Array, "... S"],
    r_key: float,
    r_value: Float32[Array, "..."],
    delta: float,
    walks: float = 30.0,
    n: int | None = None,
) -> Class:
    """Algorithm 2 over the tokens that are `valid`.

    r_key, r_value: the radii, upper bounds of the lengths of keys and values. delta: probability of
    failure. walks: the constant 30 of c = 30 log(n / delta); a smaller one balances more strongly
    and fails more often. n: tokens; None: all slots.
    """
    slots, head_dim = keys.shape[-2:]
    n = slots if n is None else n
    c = walks * math.log(n / delta)
    # Inner products are divided by R^2 = exp(r_key^2 / sqrt d) r_value^2, which can exceed float32.
    scaled = keys.astype(jnp.float32) * np.float32(head_dim**-0.25)
    units = values.astype(jnp.float32) / r_value[..., None, None]
    shift = jnp.full(r_value.shape, r_key**2 / head_dim**0.5, jnp.float32)
    gain = jnp.full(r_value.shape, 1 / (2 * c), jnp.float32)
    thresholds = jnp.where(valid, np.float32(0.5) - uniforms, NO_STEP)
    as_query = lambda a: a[..., None, :, :]  # noqa: E731
    walk = balance_walk(as_query(scaled), as_query(units), thresholds, shift, gain, 0.0)
    count = lambda sign: jnp.sum(walk.signs == sign, axis=-1, keepdims=True)  # noqa: E731
    chosen = walk.signs == jnp.where(count(1) <= count(-1), 1, -1).astype(jnp.int8)
    beyond = jnp.any(valid & certain(walk.inner), axis=-1)
    outside = jnp.any(valid & ~(_inside(keys, r_key) & _inside(units, 1.0)), axis=-1)
    return Class(chosen, beyond | outside)


def _length(vectors: Float[Array, "... H"]) -> Float32[Array, "..."]:
    return jnp.sqrt(jnp.sum(jnp.square(vectors.astype(jnp.float32)), axis=-1))


def _inside(vectors: Float[Array, "... H"], radius: float) -> Bool[Array, "..."]:
    """Whether each length is at most the radius, up to rounding; False for NaN."""
    return _length(vectors) <= np.float32(radius * (1 + 1e-6))


class Sums(NamedTuple):
    """Estimates of numerator and denominator of each query's attention.

    beyond: queries that are longer than r or not finite; the theorem does not cover them.
    """

    numerator: Float32[Array, "T X"]
    denominator: Float32[Array, " T"]
    beyond: Bool[Array, " T"]


class Instances(NamedTuple):
    """I instances of merge and reduce (Algorithm 3): levels 0 .. T of 2t slots each.

    The last level is never emptied and has room for four halves; the others contain t tokens at
    most. failures: failed halvings, and tokens that exceeded a radius, were not finite, or came
    after the stream was full. The theorem does not cover an instance with failures.
    """

    k: Float32[Array, "I L S H"]
    v: Float32[Array, "I L S X"]
    valid: Bool[Array, "I L S"]
    tokens: UInt32[Array, " I"]
    failures: Int32[Array, " I"]
    longest: Float32[Array, " 1"]  # length of the longest value so far


@dataclass(frozen=True)
class BalanceKV:
    """Algorithm 1: merge and reduce for the numerator and the denominator of attention.

    The numerator has one instance per bucket of value lengths, between two powers of two. The
    denominator has one instance, with values of one.

    batch: t. rounds: T. r: radius of keys and queries. epsilon: precision; it sets which small
    buckets are erased. lowest, buckets: the first bucket has values of up to 2^(lowest+1); a value
    longer than the last bucket's is a failure. walks: the constant of Algorithm 2; 30 in the
    theorem.

    The stream's length n is `max_tokens`, the tokens that fit. The paper leaves open which power of
    1/n the delta of Algorithm 2 is. Here delta is n^-3 over the dimension of values. Each token
    enters two instances, so there are at most 4n/t halvings, and each must serve n queries: all
    succeed with probability at least 1 - 4/(nt). The proof of Algorithm 2 treats each dimension
    separately.
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
            check_int(name, getattr(self, name))
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
        # The squares of the bucket edges must be representable in float32.
        if self.lowest < -60 or self.lowest + self.buckets > 60:
            raise UserError(
                "buckets must lie between 2^-60 and 2^60, got "
                f"lowest={self.lowest} and buckets={self.buckets}; leave them out for values of up "
                "to 2^4"
            )

    @property
    def max_tokens(self) -> int:
        """Tokens that fit: one fewer than produce a fifth half in the last level.

        2^(rounds-1) batches produce one half. With 0 rounds all tokens stay in level 0.
        """
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
        """The value radius of each instance."""
        exponents = self.lowest + np.arange(self.buckets, dtype=np.float32)
        return np.append(2 ** (exponents + 1), 1).astype(np.float32)

    def insert(
        self, state: Instances, k: Float[Array, " H"], v: Float[Array, " X"], rng: jax.Array
    ) -> Instances:
        """The state with one more token."""
        length = _length(v)
        exponent = jnp.floor(jnp.log2(jnp.maximum(length, np.float32(1e-30)))) - self.lowest
        last = np.float32(self.buckets - 1)
        # A value that is not finite goes to the last bucket, so that the numerator shows it.
        exponent = jnp.where(length < jnp.inf, exponent, last)
        bucket = jnp.clip(exponent, 0, last).astype(jnp.int32)
        number = jnp.arange(self.buckets + 1)
        goes = ((number == bucket) & (length != 0)) | (number == self.buckets)
        inside = _inside(k, self.r) & _inside(v, float(self.radii[-2]))
        # The denominator's values are 1 in their first channel and 0 in the others.
        ones = jnp.zeros_like(v).at[0].set(1)
        values = jnp.where((number == self.buckets)[:, None], ones[None], v[None])
        slot = state.tokens % np.uint32(self.batch) if self.rounds else state.tokens
        mask = goes[:, None] & (jnp.arange(2 * self.batch, dtype=jnp.uint32)[None] == slot[:, None])

        def first(leaf: Array, new: Array) -> Array:
            return leaf.at[:, 0].set(jnp.where(mask[..., None], new[:, None], leaf[:, 0]))

        state = Instances(
            k=first(state.k, jnp.broadcast_to(k[None], (len(number), len(k)))),
            v=first(state.v, values),
            valid=state.valid.at[:, 0].set(mask | state.valid[:, 0]),
            tokens=state.tokens + goes.astype(jnp.uint32),
            failures=state.failures
            + (goes & ((state.tokens >= self.max_tokens) | ~inside)).astype(jnp.int32),
            longest=jnp.where(length < jnp.inf, jnp.maximum(state.longest, length), state.longest),
        )
        state = self._erase(state)
        full = goes & (state.tokens % np.uint32(self.batch) == 0)
        batches = state.tokens // np.uint32(self.batch)
        for level in range(self.rounds):
            does = full & (batches % np.uint32(2**level) == 0)
            rng = jax.random.fold_in(rng, level)
            halve = partial(self._halve, level, does, batches >> np.uint32(level), rng)
            state = jax.lax.cond(jnp.any(does), halve, lambda s: s, state)
        return state

    def _halve(
        self, level: int, does: Array, halvings: Array, rng: jax.Array, state: Instances
    ) -> Instances:
        """Move the smaller class of a level up one level, in the instances that `does` marks."""
        uniforms = jax.random.uniform(rng, state.valid.shape[::2])
        halved = softmax_balance(
            state.k[:, level], state.v[:, level], uniforms, state.valid[:, level], self.r,
            jnp.asarray(self.radii), self._delta(state), self.walks, self.batch,
        )  # fmt: skip
        half = self.batch // 2
        order = jnp.argsort(~halved.chosen, axis=1, stable=True)[:, :half]
        # Halves are stored one after another; levels other than the last contain at most two.
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

        new_valid = up(state.valid.at[:, level].set(state.valid[:, level] & halved.chosen))
        emptied = state.valid[:, level] & ~does[:, None]
        return state._replace(
            k=up(state.k), v=up(state.v), valid=new_valid.at[:, level].set(emptied),
            failures=state.failures + (does & halved.failed).astype(jnp.int32),
        )  # fmt: skip

    def _delta(self, state: Instances) -> float:
        return 1 / (self.max_tokens**3 * state.v.shape[-1])

    def _erase(self, state: Instances) -> Instances:
        """The state without buckets whose values are negligible relative to the longest value."""
        head_dim = state.k.shape[-1]
        share = self.epsilon / (2 * self.max_tokens) * math.exp(-(self.r**2) / head_dim**0.5)
        small = jnp.asarray(self.radii[:-1] / 2) <= np.float32(share) * state.longest
        keep = jnp.append(~small, True)
        return state._replace(valid=state.valid & keep[:, None, None])

    def sums(self, state: Instances, q: Float[Array, "T H"]) -> Sums:
        """Estimates of numerator and denominator for queries q."""
        logits = jnp.einsum(
            "th,ilsh->tils", q, state.k, precision=jax.lax.Precision.HIGHEST
        ) / np.float32(state.k.shape[-1] ** 0.5)
        times = 2.0 ** np.arange(self.rounds + 1, dtype=np.float32)
        weights = jnp.where(state.valid[None], jnp.exp(logits), 0) * times[None, None, :, None]
        of_values = jnp.einsum(
            "tils,ilsx->tx", weights[:, :-1], state.v[:-1], precision=jax.lax.Precision.HIGHEST
        )
        return Sums(of_values, jnp.sum(weights[:, -1], axis=(1, 2)), ~_inside(q, self.r))
