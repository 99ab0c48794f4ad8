"""Quest (Tang et al. 2024): pages of keys, selected by an upper bound on their logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError
from jaxkv.policies.sparse_attention import base
from jaxkv.policies.sparse_attention.base import Candidates, SparsePolicy
from jaxkv.typing import Array, Bool, Float32


@dataclass(frozen=True)
class Quest(SparsePolicy):
    """Attend to whole pages of keys, selected by an upper bound on their logits.

    The minimum and the maximum of each channel bound the logit of every key in a page, so a query
    can rank pages without their keys (section 3).

    Attention within the prompt is exact. After it, each query head sees the first `sinks` tokens,
    the newest `window`, and of the others the `share` of pages with the largest bounds, rounded up,
    and at least `fewest` pages, as in the published code. page: tokens per page, counted from the
    first token of the sequence; the bounds of a page do not include tokens of sinks and window. The
    bounds use rotated keys, without a distance penalty (ALiBi) or a cap of the logits. Every token
    stays cached, and the bounds are computed for every query. start: slots before the prompt,
    doubled as they fill.
    """

    share: float = 0.1
    page: int = 16
    fewest: int = 3
    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = (
        "every token; a query attends to sinks, window and the best pages of keys"
    )
    source: ClassVar[str] = "Quest, arXiv 2406.10774"

    def __post_init__(self) -> None:
        base.check_share("share", self.share)
        if self.page < 1 or self.fewest < 1:
            raise UserError(
                f"page and fewest must be at least 1, got {self.page} and {self.fewest}; try "
                "page=16,fewest=3"
            )
        super().__post_init__()

    def select(self, candidates: Candidates) -> Float32[Array, "B K G T S"]:
        score, valid = self.bound(candidates)
        count = jnp.maximum(base.share_of(self.share, valid), self.fewest)
        best = jnp.repeat(base.largest(score, valid, count), self.page, axis=-1)
        return base.unweighted(best[..., : candidates.logits.shape[-1]] & candidates.selectable)

    def bound(
        self, candidates: Candidates
    ) -> tuple[Float32[Array, "B K G T P"], Bool[Array, "B 1 1 T P"]]:
        """An upper bound on each page's unscaled logits, and whether it has selectable keys."""
        batch, kv_heads, group, queries, slots = candidates.logits.shape
        padding = -slots % self.page
        k = jnp.pad(jax.lax.stop_gradient(candidates.k), ((0, 0), (0, 0), (0, padding), (0, 0)))
        k = k.astype(jnp.float32).reshape(batch, kv_heads, -1, self.page, k.shape[-1])
        q = jax.lax.stop_gradient(candidates.q).astype(jnp.float32)
        q = q.reshape(batch, queries, kv_heads, group, -1)
        selectable = jnp.pad(candidates.selectable[:, 0, 0], ((0, 0), (0, 0), (0, padding)))
        selectable = selectable.reshape(batch, queries, -1, self.page)

        def score_pages(query: tuple[Array, Array]) -> Array:  # [B,K,G,H], [B,P,page] -> [B,K,G,P]
            q, selectable = query
            seen = selectable[:, None, :, :, None]
            has_keys = jnp.any(seen, axis=3)
            low = jnp.where(has_keys, jnp.min(jnp.where(seen, k, jnp.inf), axis=3), np.float32(0))
            high = jnp.where(has_keys, jnp.max(jnp.where(seen, k, -jnp.inf), axis=3), np.float32(0))
            # The larger of q low and q high, channel by channel.
            dot = partial(jnp.einsum, "bkgh,bkph->bkgp", precision=jax.lax.Precision.HIGHEST)
            return dot(jnp.maximum(q, 0), high) + dot(jnp.minimum(q, 0), low)

        scores = jax.lax.map(score_pages, (jnp.moveaxis(q, 1, 0), jnp.moveaxis(selectable, 1, 0)))
        return jnp.moveaxis(scores, 0, 3), jnp.any(selectable, axis=3)[:, None, None]
