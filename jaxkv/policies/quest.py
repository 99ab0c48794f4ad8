"""Quest (Tang et al. 2024): pages of keys, chosen by a bound on the logits they may hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import met
from jaxkv.errors import UserError
from jaxkv.met import Asked, MetState
from jaxkv.typing import Array, Bool, Float32


@dataclass(frozen=True)
class Quest:
    """Read a prompt exactly, keep every token, and let each query head of what is generated see
    the first `sinks` tokens, the newest `window`, and of those between whole pages.

    page: so many tokens, counted from the first of the row; tokens at the ends are left out of
    theirs. A page is as good as the largest logit that its keys may have, going by the least and
    the greatest number in each channel, turned keys as they are. share: so many of the pages,
    rounded up, and at least `fewest`, as published. A distance penalty (ALiBi) and a cap of the
    logits are no part of the bound. Here bounds are made anew for every query. start: as in topk.
    """

    share: float = 0.1
    page: int = 16
    fewest: int = 3
    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = "every token; a query sees both ends, and the best pages between"
    source: ClassVar[str] = "Quest, arXiv 2406.10774"
    formula: ClassVar[str] = met.FORMULA
    axes: ClassVar[MetState] = met.AXES
    shared: ClassVar[tuple[str, ...]] = met.SHARED
    appends: ClassVar[tuple[str, ...]] = met.APPENDS
    reach: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        met.check_share("share", self.share)
        if self.page < 1 or self.fewest < 1:
            raise UserError(
                f"page and fewest must be at least 1, got {self.page} and {self.fewest}; try "
                "page=16,fewest=3"
            )
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
        score, there = self.bound(asked)
        count = jnp.maximum(met.part(self.share, there), self.fewest)
        best = jnp.repeat(met.largest(score, there, count), self.page, axis=-1)
        return met.only(best[..., : asked.logits.shape[-1]] & asked.between)

    def bound(self, asked: Asked) -> tuple[Float32[Array, "B K G T P"], Bool[Array, "B 1 1 T P"]]:
        """What the products of a query with the keys of each page stay below, before any scale;
        and whether a page has tokens between."""
        rows, kv_heads, group, queries, slots = asked.logits.shape
        more = -slots % self.page
        k = jnp.pad(jax.lax.stop_gradient(asked.k), ((0, 0), (0, 0), (0, more), (0, 0)))
        k = k.astype(jnp.float32).reshape(rows, kv_heads, -1, self.page, k.shape[-1])
        q = jax.lax.stop_gradient(asked.q).astype(jnp.float32)
        q = q.reshape(rows, queries, kv_heads, group, -1)
        between = jnp.pad(asked.between[:, 0, 0], ((0, 0), (0, 0), (0, more)))
        between = between.reshape(rows, queries, -1, self.page)

        def one(query: tuple[Array, Array]) -> Array:  # [B,K,G,H], [B,P,page] -> [B,K,G,P]
            q, between = query
            seen = between[:, None, :, :, None]
            some = jnp.any(seen, axis=3)
            low = jnp.where(some, jnp.min(jnp.where(seen, k, jnp.inf), axis=3), np.float32(0))
            high = jnp.where(some, jnp.max(jnp.where(seen, k, -jnp.inf), axis=3), np.float32(0))
            # The larger of q low and q high, channel by channel.
            dot = partial(jnp.einsum, "bkgh,bkph->bkgp", precision=jax.lax.Precision.HIGHEST)
            return dot(jnp.maximum(q, 0), high) + dot(jnp.minimum(q, 0), low)

        scores = jax.lax.map(one, (jnp.moveaxis(q, 1, 0), jnp.moveaxis(between, 1, 0)))
        return jnp.moveaxis(scores, 0, 3), jnp.any(between, axis=3)[:, None, None]
