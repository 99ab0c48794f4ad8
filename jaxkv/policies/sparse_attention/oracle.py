"""Oracle sampling (MagicPIG, Definition 3.1): keys drawn by their own softmax weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.policies.sparse_attention import base
from jaxkv.policies.sparse_attention.base import Candidates, SparsePolicy
from jaxkv.typing import Array, Float32, Int32


@dataclass(frozen=True)
class Oracle(SparsePolicy):
    """Attend to the mean value of keys drawn by their own softmax weights.

    Attention is an expectation of values under the softmax, so a sample by softmax weight estimates
    it without bias (section 3). MagicPIG samples by an approximate weight. This policy samples by
    the exact weight and is the oracle baseline of MagicPIG.

    Attention within the prompt is exact. After it, each query head sees the first `sinks` tokens,
    the newest `window`, and keys drawn from the others with replacement. The number of draws is
    `share` of the number of the others, rounded up. A key that is drawn twice counts twice
    (equation 5). Only the values are sampled: the draws together have the exact total weight of the
    keys between sinks and window. A draw is a function of the position and the head of the query.
    The paper also draws sinks and window. start: slots before the prompt, doubled as they fill.
    """

    share: float = 0.1
    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = (
        "every token; a query attends to sinks, window and draws by softmax weight"
    )
    source: ClassVar[str] = "MagicPIG, arXiv 2410.16179, Definition 3.1"

    def __post_init__(self) -> None:
        base.check_share("share", self.share)
        super().__post_init__()

    def select(self, candidates: Candidates) -> Float32[Array, "B K G T S"]:
        times, count = self.draw(candidates)
        share = jnp.maximum(times, 1) / jnp.maximum(count, 1)
        log_total = base.log_sum(candidates.logits, candidates.selectable)
        return jnp.where(times > 0, jnp.log(share) + log_total - candidates.logits, -jnp.inf)

    def draw(
        self, candidates: Candidates
    ) -> tuple[Int32[Array, "B K G T S"], Int32[Array, "B 1 1 T 1"]]:
        """How often each key is drawn, and the number of draws."""
        logits, slots = jax.lax.stop_gradient(candidates.logits), candidates.logits.shape[-1]
        count = base.share_of(self.share, candidates.selectable)
        place = jnp.arange(math.ceil(self.share * slots))[None, None]
        uniforms = base.uniforms(candidates, place.astype(jnp.uint32))
        uniforms = jnp.where(place[:, None, None] < count, uniforms, np.float32(2))
        weights = jnp.exp(logits - base.log_sum(logits, candidates.selectable))
        up_to = jnp.cumsum(jnp.where(candidates.selectable, weights, np.float32(0)), axis=-1)
        up_to = jax.lax.cummax(up_to, axis=up_to.ndim - 1)  # sums in a tree may round downwards
        up_to = up_to / jnp.where(up_to[..., -1:] == 0, np.float32(1), up_to[..., -1:])
        flat = lambda leaf: leaf.reshape(-1, leaf.shape[-1])
        below = jax.vmap(jnp.searchsorted)(flat(jnp.sort(uniforms, axis=-1)), flat(up_to))
        below = below.reshape(logits.shape)
        return jnp.diff(below, axis=-1, prepend=0), count
