"""Oracle sampling (MagicPIG, Definition 3.1): keys drawn by their own softmax weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import met
from jaxkv.met import Asked, MetState
from jaxkv.typing import Array, Float32, Int32


@dataclass(frozen=True)
class Oracle:
    """Read a prompt exactly, keep every token, and let each query head of what is generated see
    the first `sinks` tokens, the newest `window`, and for those between the mean value of keys
    drawn by their weights: what sampling by an approximate weight could at best do.

    share: so many draws, with replacement, of the number of tokens between, rounded up; a key that
    is drawn twice is met once and counts twice (equation 5). Only the values are sampled: together
    they weigh as much as all that lies between, whose sum of weights is known here. A draw follows
    from the query's position and head. (In the paper sinks and window are drawn too.) start: as in
    topk.
    """

    share: float = 0.1
    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = "every token; a query sees both ends, and between draws by weight"
    source: ClassVar[str] = "MagicPIG, arXiv 2410.16179, Definition 3.1"
    formula: ClassVar[str] = met.FORMULA
    axes: ClassVar[MetState] = met.AXES
    shared: ClassVar[tuple[str, ...]] = met.SHARED
    appends: ClassVar[tuple[str, ...]] = met.APPENDS
    reach: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        met.check_share("share", self.share)
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
        times, count = self.draw(asked)
        share = jnp.maximum(times, 1) / jnp.maximum(count, 1)
        whole = met.log_sum(asked.logits, asked.between)
        return jnp.where(times > 0, jnp.log(share) + whole - asked.logits, -jnp.inf)

    def draw(self, asked: Asked) -> tuple[Int32[Array, "B K G T S"], Int32[Array, "B 1 1 T 1"]]:
        """How often each key is drawn, and how many draws that are."""
        logits, slots = jax.lax.stop_gradient(asked.logits), asked.logits.shape[-1]
        count = met.part(self.share, asked.between)
        place = jnp.arange(math.ceil(self.share * slots))[None, None]
        chance = met.chances(asked, place.astype(jnp.uint32))
        chance = jnp.where(place[:, None, None] < count, chance, np.float32(2))
        weights = jnp.exp(logits - met.log_sum(logits, asked.between))
        up_to = jnp.cumsum(jnp.where(asked.between, weights, np.float32(0)), axis=-1)
        up_to = jax.lax.cummax(up_to, axis=up_to.ndim - 1)  # sums in a tree may round downwards
        up_to = up_to / jnp.where(up_to[..., -1:] == 0, np.float32(1), up_to[..., -1:])
        flat = lambda leaf: leaf.reshape(-1, leaf.shape[-1])  # noqa: E731
        below = jax.vmap(jnp.searchsorted)(flat(jnp.sort(chance, axis=-1)), flat(up_to))
        below = below.reshape(logits.shape)
        return jnp.diff(below, axis=-1, prepend=0), count
