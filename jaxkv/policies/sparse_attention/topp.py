"""Exact top-p attention (Lin et al. 2025): the fewest keys whose weights reach a mass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.policies.sparse_attention import base
from jaxkv.policies.sparse_attention.base import Candidates, SparsePolicy
from jaxkv.typing import Array, Float32


@dataclass(frozen=True)
class TopP(SparsePolicy):
    """Attend to the fewest keys whose softmax weights reach `mass`.

    A fixed number of keys is too many for a peaked head and too few for a flat one. A fixed mass
    adapts to each head and query (section 3.2).

    Attention within the prompt is exact. After it, each query head sees the first `sinks` tokens,
    the newest `window`, and of the others the fewest keys whose softmax weights reach the fraction
    `mass` of the weight of the others, as in vAttention's code. Every token stays cached. Published
    experiments use values of `mass` from 0.1 to 0.99. start: slots before the prompt, doubled as
    they fill.
    """

    mass: float = 0.9
    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = (
        "every token; a query attends to sinks, window and the keys that reach a mass"
    )
    source: ClassVar[str] = "Twilight, arXiv 2502.02770, Definition 3.3"

    def __post_init__(self) -> None:
        base.check_share("mass", self.mass, 0.9)
        super().__post_init__()

    def select(self, candidates: Candidates) -> Float32[Array, "B K G T S"]:
        logits = jax.lax.stop_gradient(candidates.logits)
        log_total = base.log_sum(logits, candidates.selectable)
        weights = jnp.where(candidates.selectable, jnp.exp(logits - log_total), np.float32(0))
        # Summed from the smallest up, to lose little: the many small weights may stay unseen.
        unseen = jnp.cumsum(jnp.sort(weights, axis=-1), axis=-1)
        dropped = unseen <= np.float32(1 - self.mass) * unseen[..., -1:]
        count = jnp.sum(~dropped, axis=-1, keepdims=True, dtype=jnp.int32)
        return base.unweighted(base.largest(logits, candidates.selectable, count))
