"""vAttention (Desai et al. 2025): the largest logits, and a random sample of the others."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError, check_choice
from jaxkv.policies.sparse_attention import base as shared  # `base` is a field here
from jaxkv.policies.sparse_attention.base import Candidates, SparsePolicy
from jaxkv.typing import Array, Bool, Float32, Int32


@dataclass(frozen=True)
class VAttention(SparsePolicy):
    """Attend to the largest logits and a random sample of the others, sized to meet an error bound.

    The largest logits have most of the softmax weight. The rest is many small weights, which a
    random sample estimates well. A first sample measures how much the small weights vary, and so
    how large the sample must be (section 4).

    Attention within the prompt is exact. After it, each query head sees the first `sinks` tokens,
    the newest `window`, and of the others the share `top` with the largest logits. It also sees a
    sample of the remaining keys, which counts for all of these. Every token stays cached.

    base: the share of the remaining keys in the first sample, at least two keys; it estimates the
    variance. epsilon, delta: the sample is as large as needed to keep the relative error of the sum
    of weights within `epsilon` with a failure probability of `delta`. It includes the first sample,
    and no key is drawn twice. The bound assumes a normal distribution of the sample mean, so it
    fails more often than `delta` if weights vary much (logits with a standard deviation of 3 or
    more). sides: `two` uses the quantile of 1 - delta/2. `one` uses that of 1 - delta, as the
    public code does, and fails more often. A draw is a function of the positions of query and key,
    and the head. start: slots before the prompt, doubled as they fill.
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
        "every token; a query attends to sinks, window, largest logits and a sample"
    )
    source: ClassVar[str] = "vAttention, arXiv 2510.05688"

    def __post_init__(self) -> None:
        if not 0 <= self.top <= 1:
            raise UserError(f"top must be from 0 to 1, got {self.top}; try top=0.05")
        shared.check_share("base", self.base, 0.025)
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0 < value < 1:
                raise UserError(f"{name} must be between 0 and 1, got {value}; try {name}=0.05")
        check_choice("sides", self.sides, ("two", "one"))
        super().__post_init__()

    def select(self, candidates: Candidates) -> Float32[Array, "B K G T S"]:
        selectable = candidates.selectable
        top = shared.largest(candidates.logits, selectable, shared.share_of(self.top, selectable))
        rest = selectable & ~top
        count = jnp.sum(rest, axis=-1, keepdims=True, dtype=jnp.int32)
        uniforms = shared.uniforms(candidates, candidates.key_positions[:, None])
        pilot = jnp.minimum(jnp.maximum(shared.share_of(self.base, rest), 2), count)
        first = shared.largest(-uniforms, rest, pilot)  # of the smallest draws
        budget = self._budget(candidates, candidates.exact | top, first, pilot, count)
        times = jnp.maximum(count, 1) / jnp.maximum(budget, 1)
        sample = jnp.where(shared.largest(-uniforms, rest, budget), jnp.log(times), -jnp.inf)
        return jnp.where(top, np.float32(0), sample)

    def _budget(
        self,
        candidates: Candidates,
        exact: Bool[Array, "B K G T S"],
        first: Bool[Array, "B K G T S"],
        pilot: Int32[Array, "B K G T 1"],
        count: Int32[Array, "B K G T 1"],
    ) -> Int32[Array, "B K G T 1"]:
        """How many of the `count` others to draw, estimated from the first `pilot` of them."""
        logits = jax.lax.stop_gradient(candidates.logits)
        visible = candidates.exact | candidates.selectable
        weights = jnp.exp(logits - shared.log_sum(logits, visible))
        mean = _sum(weights, first) / jnp.maximum(pilot, 1).astype(jnp.float32)
        degrees_of_freedom = jnp.maximum(pilot - 1, 1).astype(jnp.float32)
        variance = _sum(jnp.square(weights - mean), first) / degrees_of_freedom
        many = count.astype(jnp.float32)
        total = _sum(weights, exact) + many * mean
        total = jnp.where(total == 0, np.float32(1), total)
        tail = self.delta / 2 if self.sides == "two" else self.delta
        quantile = max(0.0, NormalDist().inv_cdf(1 - tail))
        error = many * jnp.sqrt(variance) / total
        needed = jnp.ceil(jnp.square(error * np.float32(quantile / self.epsilon)))
        return jnp.maximum(pilot, jnp.minimum(needed, many).astype(jnp.int32))


def _sum(values: Array, among: Array) -> Array:
    return jnp.sum(jnp.where(among, values, np.float32(0)), axis=-1, keepdims=True)
