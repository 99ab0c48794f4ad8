"""vAttention (Desai et al. 2025): the largest logits, and of the others as many at random as it
takes to know the sum of weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import met
from jaxkv.errors import UserError
from jaxkv.met import Asked, MetState
from jaxkv.typing import Array, Bool, Float32, Int32


@dataclass(frozen=True)
class VAttention:
    """Read a prompt exactly, keep every token, and let each query head of what is generated see
    the first `sinks` tokens, the newest `window`, of those between the largest logits, and of the
    others a random sample that counts for all of them.

    top: the share of those between that are the largest. base: the share of the others that is
    drawn first, two at least, to see how far their weights differ. epsilon, delta: then as many are
    drawn as keep the sum of all weights within `epsilon` of itself, but for a chance of `delta`;
    the first are among them, and none is drawn twice. sides: `one` takes the quantile of 1 - delta
    as the public code does, which fails more often than `delta` says; `two` that of 1 - delta / 2.
    A draw follows from the positions of query and key and the head. start: as in topk.
    """

    top: float = 0.05
    base: float = 0.025
    epsilon: float = 0.05
    delta: float = 0.05
    sides: Literal["two", "one"] = "two"
    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = (
        "every token; a query sees both ends, and between the best and a sample"
    )
    source: ClassVar[str] = "vAttention, arXiv 2510.05688"
    formula: ClassVar[str] = met.FORMULA
    axes: ClassVar[MetState] = met.AXES
    shared: ClassVar[tuple[str, ...]] = met.SHARED
    appends: ClassVar[tuple[str, ...]] = met.APPENDS
    reach: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.top <= 1:
            raise UserError(f"top must be from 0 to 1, got {self.top}; try top=0.05")
        met.check_share("base", self.base, 0.025)
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0 < value < 1:
                raise UserError(f"{name} must be between 0 and 1, got {value}; try {name}=0.05")
        if self.sides not in ("two", "one"):
            raise UserError(f"sides must be two or one, got {self.sides!r}; try sides=two")
        met.check(self.sinks, self.window, self.start)

    init = met.init
    attend = met.attend
    take = decode = met.take
    reserve = staticmethod(met.reserve)
    seal = staticmethod(met.seal)
    extend = staticmethod(met.extend)
    kept = staticmethod(met.kept)

    def choose(self, asked: Asked) -> Float32[Array, "B K G T S"]:
        """The log weight of each key between, -inf of those that are not met."""
        top = met.largest(asked.logits, asked.between, met.part(self.top, asked.between))
        rest = asked.between & ~top
        count = jnp.sum(rest, axis=-1, keepdims=True, dtype=jnp.int32)
        chance = -met.chances(asked, asked.positions[:, None])
        base = jnp.minimum(jnp.maximum(met.part(self.base, rest), 2), count)
        first = met.largest(chance, rest, base)
        budget = self._budget(asked, asked.exact | top, first, base, count)
        times = jnp.maximum(count, 1) / jnp.maximum(budget, 1)
        sample = jnp.where(met.largest(chance, rest, budget), jnp.log(times), -jnp.inf)
        return jnp.where(top, np.float32(0), sample)

    def _budget(
        self, asked: Asked, sure: Bool[Array, "B K G T S"], first: Bool[Array, "B K G T S"],
        base: Int32[Array, "B K G T 1"], count: Int32[Array, "B K G T 1"],
    ) -> Int32[Array, "B K G T 1"]:  # fmt: skip
        """How many of the `count` others to draw, going by the first `base` of them."""
        logits, here = jax.lax.stop_gradient(asked.logits), asked.exact | asked.between
        weights = jnp.exp(logits - met.log_sum(logits, here))
        mean = _sum(weights, first) / jnp.maximum(base, 1).astype(jnp.float32)
        others = jnp.maximum(base - 1, 1).astype(jnp.float32)
        variance = _sum(jnp.square(weights - mean), first) / others
        many = count.astype(jnp.float32)
        whole = _sum(weights, sure) + many * mean
        whole = jnp.where(whole == 0, np.float32(1), whole)
        tail = self.delta / 2 if self.sides == "two" else self.delta
        quantile = max(0.0, NormalDist().inv_cdf(1 - tail))
        error = many * jnp.sqrt(variance) / whole
        needed = jnp.ceil(jnp.square(error * np.float32(quantile / self.epsilon)))
        return jnp.maximum(base, jnp.minimum(needed, many).astype(jnp.int32))


def _sum(of: Array, among: Array) -> Array:
    return jnp.sum(jnp.where(among, of, np.float32(0)), axis=-1, keepdims=True)
