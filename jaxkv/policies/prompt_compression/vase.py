"""VaSE (Chang et al. 2026): large values, and a sample of the other tokens by attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jaxkv import draws, rows
from jaxkv.contract import Chunk, Spec
from jaxkv.errors import UserError
from jaxkv.policies.prompt_compression import base, snapkv
from jaxkv.policies.prompt_compression.base import (
    CompressionPolicy,
    ExactEnds,
    Positions,
    ScoredTokens,
)
from jaxkv.policies.prompt_compression.snapkv import LastQueries
from jaxkv.rows import Storage
from jaxkv.typing import Array, Float32


@dataclass(frozen=True)
class VaSE(CompressionPolicy):
    """Cache the newest tokens, those with large values, and a sample of the others by attention.

    A few values are much larger than the others, and a reasoning model that loses them repeats
    itself without end. A random choice among the other tokens caches more different ones than the
    most attended do.

    Of the tokens before the newest `window`, the first `sinks` stay, and those whose values have
    the largest range (maximum minus minimum): together the share `large` of `capacity`. The other
    places go to tokens drawn without replacement, each in proportion to its attention (as in
    snapkv) from the last `window` queries, averaged over the queries, over `kernel` neighbours and
    over the query heads of a KV head. A draw is a function of the seed, of the token's position and
    of the newest token's position, so each compression has draws of its own. It has no `budgets`,
    because draws of different KV heads cannot be compared.

    This is VaSE-AttnV, after the authors' code (github.com/terarachang/VaSE) and its setting for
    MATH-500; the variant VaSE-DKV is left out. The code compresses a prompt when the answer begins,
    and the answer again and again; with `every` a long prompt is compressed while it is read, and
    without it the answer is cached in full. The code's positions are those of the text, here
    positions=absolute. every, positions: as in keydiff.
    start: slots before the prompt, doubled as they fill. storage: as in streaming.
    """

    capacity: int = 1024
    sinks: int = 4
    window: int = 64
    large: float = 0.25
    kernel: int = 5
    every: int | None = 64
    positions: Positions = None
    start: int = 512
    storage: Storage = "float"

    summary: ClassVar[str] = "the newest tokens, large values, and a sample by attention"
    source: ClassVar[str] = "VaSE, arXiv 2606.03928"
    statistics_leaves: ClassVar[LastQueries] = snapkv.LEAVES

    def __post_init__(self) -> None:
        base.check_ends(self.ends, self.start)
        base.check_capacity(self.capacity, self.start, window=self.window)
        snapkv.check_kernel(self.kernel)
        if not 0 <= self.large <= 1:
            raise UserError(f"large must be from 0 to 1, got {self.large}; try large=0.25")
        if self.sinks < 0:
            raise UserError(f"sinks must be 0 or more, got {self.sinks}; try sinks=4")
        if not self.sinks <= self.num_large <= self.budget:
            raise UserError(
                "large x capacity must be at least sinks and at most capacity - window, got "
                f"{self.num_large}, {self.sinks} and {self.budget}; raise capacity, or lower "
                f"{'sinks' if self.num_large < self.sinks else 'large or window'}"
            )
        super().__post_init__()

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(0, self.window)

    @property
    def num_large(self) -> int:
        """The number of tokens that stay for their values, sinks included."""
        return round(self.large * self.capacity)

    def statistics(self, spec: Spec, batch: int) -> LastQueries:
        return snapkv.no_queries(spec, batch, self.window)

    def observe(self, spec: Spec, statistics: LastQueries, chunk: Chunk) -> LastQueries:
        return snapkv.with_queries(spec, statistics, chunk)

    def score(self, spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K C"]:
        """Infinite for large values; else log attention plus Gumbel noise, to draw the highest."""
        logits = snapkv.logits_of_last_queries(spec, tokens)[..., tokens.slots]
        attention = jnp.mean(snapkv.shares(logits, tokens.scored[:, :, None, None]), axis=3)
        attention = jnp.mean(snapkv.pooled(attention, self.kernel, "mean"), axis=2)
        numbers = tokens.stored.positions[:, :, tokens.slots]
        numbers = numbers + tokens.newest_position[:, None] * draws.GOLDEN
        uniform = jnp.maximum(draws.uniforms(numbers, tokens.rng), np.float32(2**-25))
        sampled = jnp.log(attention) - jnp.log(-jnp.log(uniform))
        v = rows.dequantise(tokens.stored.v)[:, :, tokens.slots].astype(jnp.float32)
        slot = jnp.arange(v.shape[2])[None, None]
        extent = jnp.where(slot < self.sinks, jnp.inf, jnp.max(v, axis=3) - jnp.min(v, axis=3))
        order = jnp.argsort(jnp.where(tokens.scored, -extent, jnp.inf), axis=2, stable=True)
        rank = jnp.argsort(order, axis=2)
        return jnp.where(rank < self.num_large, jnp.inf, sampled)
