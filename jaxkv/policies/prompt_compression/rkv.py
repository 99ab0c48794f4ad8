"""R-KV (Cai et al. 2025): tokens that are attended to and whose keys are not redundant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxkv import rows
from jaxkv.contract import Chunk, Spec
from jaxkv.errors import UserError
from jaxkv.policies.prompt_compression import base, snapkv
from jaxkv.policies.prompt_compression.base import (
    Budgets,
    CompressionPolicy,
    ExactEnds,
    Positions,
    ScoredTokens,
)
from jaxkv.policies.prompt_compression.head_shares import LayerBudgets
from jaxkv.policies.prompt_compression.snapkv import LastQueries
from jaxkv.rows import Storage
from jaxkv.typing import Array, Bool, Float32, Int32

_ROWS = 256  # keys that are compared with all others at a time


@dataclass(frozen=True)
class RKV(CompressionPolicy):
    """Cache the newest `window` tokens, and those that these attend to and that repeat no others.

    The chain of thought of a reasoning model repeats itself, and its repetitions attend to each
    other. So attention alone keeps the repetitions; the similarity of keys finds them.

    importance: the attention (as in snapkv) of the last `window` queries to the tokens before them,
    as a mean. The logits are first maximised over the query heads of a KV head; attention is then
    maximised over `kernel` neighbours. redundancy: the mean cosine of a token's key with the keys
    of all cached tokens, as a softmax over the tokens. The newest of the tokens that are alike (a
    cosine above `threshold`) is not redundant to any of them, so it stays. Of only two alike
    tokens, neither is redundant to the other. The score is mix x importance - (1 - mix) x
    redundancy.

    After the authors' code (github.com/Zefan-Cai/R-KV), which keeps one of the tokens that are
    alike; its description allows several. mix: 0.1 as in the description; the script has 0.07. In
    the code a key without any like it is not counted against the first token; here it is. Its
    positions are those of the text, here positions=absolute.

    capacity, every, positions, budgets, calibration: as in keydiff. 128 tokens is the published
    interval. start: slots before the prompt, doubled as they fill. storage: as in streaming.
    """

    capacity: int = 1024
    window: int = 8
    kernel: int = 7
    mix: float = 0.1
    threshold: float = 0.5
    budgets: Budgets = "equal"
    calibration: str | None = None
    every: int | None = 128
    positions: Positions = None
    start: int = 512
    storage: Storage = "float"
    layer_budgets: LayerBudgets | None = field(default=None, repr=False)  # set by `for_layer`

    summary: ClassVar[str] = "the newest tokens, and attended ones whose keys repeat no others"
    source: ClassVar[str] = "R-KV, arXiv 2505.24133"
    statistics_leaves: ClassVar[LastQueries] = snapkv.LEAVES

    def __post_init__(self) -> None:
        base.check_ends(self.ends, self.start, "window=8")
        base.check_capacity(self.capacity, self.start, window=self.window)
        snapkv.check_kernel(self.kernel)
        if not 0 <= self.mix <= 1 or not -1 <= self.threshold <= 1:
            raise UserError(
                "mix must be from 0 to 1 and threshold, a cosine, from -1 to 1, got "
                f"{self.mix} and {self.threshold}; try mix=0.1,threshold=0.5"
            )
        super().__post_init__()

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(0, self.window)

    def statistics(self, spec: Spec, batch: int) -> LastQueries:
        return snapkv.no_queries(spec, batch, self.window)

    def observe(self, spec: Spec, statistics: LastQueries, chunk: Chunk) -> LastQueries:
        return snapkv.with_queries(spec, statistics, chunk)

    def score(self, spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K C"]:
        logits = snapkv.logits_of_last_queries(spec, tokens)[..., tokens.slots]
        logits = jnp.max(logits, axis=2, keepdims=True)
        attention = jnp.mean(snapkv.shares(logits, tokens.scored[:, :, None, None]), axis=3)
        importance = snapkv.pooled(attention, self.kernel, "max")[:, :, 0]
        k = rows.dequantise(tokens.seen.k).astype(jnp.float32)
        redundancy = redundancies(k, tokens.filled, tokens.count, self.threshold)
        mix = jnp.float32(self.mix)
        return mix * importance - (1 - mix) * redundancy[:, :, tokens.slots]


def redundancies(
    k: Float32[Array, "B K S H"],
    filled: Bool[Array, "#B #K S"],
    count: Int32[Array, "#B #K"],
    threshold: float,
) -> Float32[Array, "B K S"]:
    """The softmax, over the filled slots, of the mean cosine of each key with all others."""
    k = jnp.where(filled[..., None], rows.unit(k), 0.0)
    size = k.shape[2]
    block = min(_ROWS, size)
    slot = jnp.arange(size)

    def add_rows(total: Array, start: Array) -> tuple[Array, None]:
        row = start + jnp.arange(block)
        part = jnp.take(k, jnp.minimum(row, size - 1), axis=2)
        part = jnp.where((row < size)[None, None, :, None], part, 0.0)
        cosine = jnp.einsum("bkrh,bksh->bkrs", part, k, precision=jax.lax.Precision.HIGHEST)
        cosine = jnp.where((row[:, None] == slot[None])[None, None], 0.0, cosine)
        alike = (cosine > threshold) & filled[:, :, None]
        newest = jnp.max(jnp.where(alike, slot[None, None, None], -1), axis=3, keepdims=True)
        cosine = jnp.where(slot[None, None, None] == newest, 0.0, cosine)
        return total + jnp.sum(cosine, axis=2), None

    total, _ = jax.lax.scan(add_rows, jnp.zeros(k.shape[:3]), jnp.arange(0, size, block))
    mean = total / jnp.maximum(count, 1)[..., None].astype(jnp.float32)
    return snapkv.shares(mean[:, :, None, None], filled[:, :, None, None])[:, :, 0, 0]
