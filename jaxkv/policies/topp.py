"""Exact top-p attention: as many of the largest logits as it takes to hold a mass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import met
from jaxkv.met import Asked, MetState
from jaxkv.typing import Array, Float32


@dataclass(frozen=True)
class TopP:
    """Read a prompt exactly, keep every token, and let each query head of what is generated see
    the first `sinks` tokens, the newest `window`, and of those between the fewest whose softmax
    weights reach `mass`.

    mass: of the weight that lies between, the ends left out of it; the grids of others go from 0.1
    to 0.99. start: as in topk.
    """

    mass: float = 0.9
    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = "every token; a query sees both ends, and between what holds a mass"
    source: ClassVar[str] = "top-p as in vAttention, arXiv 2510.05688"
    formula: ClassVar[str] = met.FORMULA
    axes: ClassVar[MetState] = met.AXES
    shared: ClassVar[tuple[str, ...]] = met.SHARED
    appends: ClassVar[tuple[str, ...]] = met.APPENDS
    reach: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        met.check_share("mass", self.mass, 0.9)
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
        logits = jax.lax.stop_gradient(asked.logits)
        whole = met.log_sum(logits, asked.between)
        weights = jnp.where(asked.between, jnp.exp(logits - whole), np.float32(0))
        # Summed from the smallest up, in which little is lost: what may stay unseen, may be many.
        unseen = jnp.cumsum(jnp.sort(weights, axis=-1), axis=-1)
        few = unseen <= np.float32(1 - self.mass) * unseen[..., -1:]
        count = jnp.sum(~few, axis=-1, keepdims=True, dtype=jnp.int32)
        return met.only(met.largest(logits, asked.between, count))
