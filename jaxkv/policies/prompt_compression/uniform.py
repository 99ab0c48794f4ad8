"""A uniform sample of a finished prompt: the baseline of BalanceKV (Han et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jaxkv import draws
from jaxkv.cache import per_head
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Spec
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import CompressedState, CompressionPolicy, ExactEnds
from jaxkv.rows import Storage
from jaxkv.typing import Array


@dataclass(frozen=True)
class Uniform(CompressionPolicy):
    """Keep a prompt's first `sinks` tokens, its last `window`, and one in 2^rounds of the others.

    A uniform sample, weighted by the inverse of its probability, estimates the sums of the softmax
    without bias. It does not look at keys or queries, so it is the baseline of methods that select
    (BalanceKV, section 4.1).

    Each KV head draws its own sample, without replacement. Generated tokens are cached exactly.
    weighted: a sampled token counts for 2^rounds in the softmax, as in BalanceKV. start: slots
    before the prompt, doubled as they fill. storage: as in streaming.
    """

    sinks: int = 32
    window: int = 32
    rounds: int = 2
    weighted: bool = True
    start: int = 512
    storage: Storage = "float"

    summary: ClassVar[str] = "a prompt's first and last tokens, and a random sample of the others"
    source: ClassVar[str] = "the baseline of BalanceKV, arXiv 2502.07861"

    def __post_init__(self) -> None:
        base.check_rounds(self.rounds)
        base.check_ends(self.ends, self.start)
        super().__post_init__()

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(self.sinks, self.window, 1 << self.rounds)

    def choose(
        self, spec: Spec, state: CompressedState, tokens: PerHeadTokens, count: Array
    ) -> base.Chosen:
        size = tokens.positions.shape[2]
        place = jnp.arange(size, dtype=jnp.uint32)[None, None]
        bits = draws.bits(place, state.rng)
        bits = jnp.where(place.astype(jnp.int32) < count[:, None, None], bits, np.uint32(2**32 - 1))
        chosen = jnp.argsort(bits, axis=2)[:, :, : -(-size >> self.rounds)]
        taken = per_head.pick(tokens, chosen.astype(jnp.int32))
        weight = self.rounds * math.log(2) if self.weighted else 0.0
        return base.weighted_sample(taken, count >> self.rounds, weight)
