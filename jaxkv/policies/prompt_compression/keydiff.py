"""KeyDiff (Park et al. 2025): the tokens of a finished prompt whose keys are least alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import jax.numpy as jnp

from jaxkv import rows
from jaxkv.cache import per_head
from jaxkv.contract import Chunk, Leaf, Spec, State
from jaxkv.errors import check_choice
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import (
    Budgets,
    CompressionPolicy,
    ExactEnds,
    Positions,
    ScoredTokens,
)
from jaxkv.policies.prompt_compression.head_shares import LayerBudgets
from jaxkv.rows import Rows, Storage
from jaxkv.typing import Array, Float32, UInt32

Keys = Literal["rotated", "unrotated"]
GRID = 2.0**14  # of scores, of which nearer ones count as equal; the older token stays


@dataclass(frozen=True)
class KeyDiff(CompressionPolicy):
    """Keep the `capacity` tokens of a prompt whose keys differ most from the mean key of the head.

    Keys that point away from the others tend to receive more attention, and a set of such keys
    covers more directions (section 3). The score needs no query, so it does not depend on what is
    asked later.

    The score is minus the cosine of a key with the mean of all keys of the prompt, each divided by
    its length. Keys are compared as they are cached, rotated to their positions. The paper's
    algorithm evicts block by block while it reads the prompt; here the whole prompt is scored once.
    Generated tokens are cached exactly. A prompt of at most `capacity` tokens is not compressed.

    keys: rotated, as in the paper, or unrotated, as they were before their rotation; scores of
    unrotated keys are rounded to 2^-14, and of equal ones in a head the older token stays. budgets:
    equal for `capacity` tokens in each KV head; adaptive for as many in all heads of a layer
    together (AdaKV, arXiv 2407.11550), of which each head has at least a fifth of an equal share,
    as in kvpress; calibrated for as many in all heads of the model together, of which
    each head has a fixed number, and each layer one of eight sums. calibration: for
    budgets=calibrated, the file that `jaxkv calibrate` wrote, or the name of one in the package.
    Then a head compresses each prompt that is longer than its number. start: slots before the
    prompt, doubled as they fill. storage: as in streaming.

    every: compress whenever so many tokens beyond `capacity` are cached, in prompts and answers
    alike, so that endless text fits a constant memory. A query sees at most `capacity` + `every`
    tokens, with unequal budgets on average over the heads. The mean key is then that of all tokens
    so far; in the paper it is that of the cached tokens and the newest block. positions: with
    `every`, relative (the default) counts positions within the cache, as in streaming, and absolute
    in the text. A head with more tokens than an equal share gives its furthest ones the same
    relative position.
    """

    capacity: int = 1024
    keys: Keys = "rotated"
    budgets: Budgets = "equal"
    calibration: str | None = None
    every: int | None = None
    positions: Positions = None
    start: int = 512
    storage: Storage = "float"
    layer_budgets: LayerBudgets | None = field(default=None, repr=False)  # set by `for_layer`

    summary: ClassVar[str] = "the tokens of a prompt whose keys are least alike"
    source: ClassVar[str] = "KeyDiff, arXiv 2504.15364"
    ends: ClassVar[ExactEnds] = ExactEnds(0, 0)

    def __post_init__(self) -> None:
        base.check_capacity(self.capacity, self.start)
        check_choice("keys", self.keys, ("rotated", "unrotated"))
        super().__post_init__()

    @property
    def statistics_leaves(self) -> State:
        return () if self.every is None else Leaf("B K M H")

    def statistics(self, spec: Spec, batch: int) -> State:
        """With `every`, the sum of the keys of all tokens, each of length 1."""
        shape = batch, spec.kv_heads, 1, spec.head_dim
        return () if self.every is None else jnp.zeros(shape, jnp.float32)

    def observe(self, spec: Spec, statistics: State, chunk: Chunk) -> State:
        if self.every is None:
            return statistics
        k = spec.encoding.rotate(chunk.k, chunk.positions).transpose(0, 2, 1, 3)
        k = rows.quantise(k) if self.storage == "int8" else k.astype(spec.dtype)
        k = self._directions(spec, k, jnp.broadcast_to(chunk.positions[:, None], k.shape[:3]))
        k = jnp.where(chunk.valid[:, None, :, None], k, 0.0)
        return statistics + jnp.sum(k, axis=2, keepdims=True)

    def score(self, spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K C"]:
        """Minus the cosine of each key with the mean of all keys of length 1."""
        k, total = (
            self._directions(spec, tokens.stored.k, tokens.stored.positions),
            tokens.statistics,
        )
        if self.every is None:
            total = jnp.sum(jnp.where(tokens.filled[..., None], k, 0.0), axis=2, keepdims=True)
        score = -jnp.sum(k * rows.unit(total), axis=-1)[:, :, tokens.slots]
        # In the first layer equal tokens have equal keys before rotation. Without a grid rounding
        # would choose among them, and rounding depends on the size of chunks.
        return score if self.keys == "rotated" else jnp.round(score * GRID) / GRID

    def _directions(
        self, spec: Spec, k: Rows, positions: UInt32[Array, "B K S"]
    ) -> Float32[Array, "B K S H"]:
        """Stored keys [B,K,S,H], of length 1."""
        k = rows.dequantise(k).astype(jnp.float32)
        if self.keys == "unrotated":
            k = per_head.rerotate(replace(spec, dtype="float32"), k, -positions)
        return rows.unit(k)
