"""TOVA (Oren et al. 2024): the tokens that the newest query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from jaxkv.contract import Chunk, Spec
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
class TOVA(CompressionPolicy):
    """Cache the `capacity` tokens that the newest query attends to most.

    A decoder with a cache of a fixed size is a recurrent network whose state is a set of tokens.
    The attention of the newest query tells best which of them may leave.

    The score of a token is its attention (as in snapkv) from the newest query, averaged over all
    query heads of the layer, so all KV heads of a layer cache the same tokens. The newest token may
    be evicted like any other. every: as in keydiff. With the default of 1 every token evicts
    another, in prompts and answers alike, so a prompt is processed token by token. The published
    code reads the prompt with full attention, compresses it once, and then evicts at each token of
    the answer. No setting does both: with every=none the prompt is compressed once, and the answer
    is cached in full. kvpress's TOVA always keeps the newest token. positions, start: as in
    keydiff. storage: as in streaming.
    """

    capacity: int = 256
    every: int | None = 1
    positions: Positions = None
    start: int = 512
    storage: Storage = "float"

    summary: ClassVar[str] = "the tokens that the newest query attends to, the same in all heads"
    source: ClassVar[str] = "TOVA, arXiv 2401.06104"
    ends: ClassVar[ExactEnds] = ExactEnds(0, 0)
    statistics_leaves: ClassVar[LastQueries] = snapkv.LEAVES
    heads_coupled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        base.check_capacity(self.capacity, self.start)
        super().__post_init__()

    def statistics(self, spec: Spec, batch: int) -> LastQueries:
        return snapkv.no_queries(spec, batch, 1)

    def observe(self, spec: Spec, statistics: LastQueries, chunk: Chunk) -> LastQueries:
        return snapkv.with_queries(spec, statistics, chunk)

    def score(self, spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K C"]:
        attention = snapkv.attention_of_last_queries(spec, tokens)
        mean = jnp.mean(attention, axis=(1, 2))[:, None]
        return jnp.broadcast_to(mean, (*attention.shape[:2], mean.shape[2]))
