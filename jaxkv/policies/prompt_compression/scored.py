"""Scores from outside: the tokens of a prompt with the largest scores that the caller computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Leaf, Spec, prefill_finished
from jaxkv.errors import UserError
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import (
    CompressedState,
    CompressionPolicy,
    ExactEnds,
    ScoredTokens,
)
from jaxkv.policies.prompt_compression.head_shares import LayerBudgets
from jaxkv.rows import Storage
from jaxkv.typing import Array, Float32, Int32, Integer

ScoreFunction = Callable[[Spec, ScoredTokens], Float32[Array, "B K C"]]


@dataclass(frozen=True)
class Scored(CompressionPolicy):
    """Keep a prompt's ends and, of the others, the tokens with the largest scores of the caller.

    Some scores need the model again, as those of KVzip do (arXiv 2505.23416), or a network of their
    own. So this policy is for Python alone. The caller computes the scores after the prompt and
    puts them into the state:

        state = policy.with_scores(state, scores)  # [B,K,S], a score for each token of the prompt
        state = policy.finish_prefill(spec, state)

    function: computes the scores of the tokens between the ends [B,K,C] in place of that, from
    `ScoredTokens`. A state without scores, or with NaN among them, gives NaN after the prompt.

    budgets: equal and adaptive as in keydiff; global for numbers of tokens that the caller puts
    into the state with the scores, those of `global_budgets` for example. Then the compressed
    prompt has `rows` of all KV heads together, empty ones too. The other fields are those of
    retrieval.
    """

    capacity: int = 1024
    sinks: int = 4
    window: int = 0
    budgets: Literal["equal", "adaptive", "global"] = "equal"
    start: int = 512
    storage: Storage = "float"
    function: ScoreFunction | None = None
    rows: int = 0

    summary: ClassVar[str] = "a prompt's ends, and the tokens with the largest scores of the caller"
    source: ClassVar[str] = "KVzip, arXiv 2505.23416, for scores of `context_scores`"
    statistics_leaves: ClassVar[Leaf] = Leaf("B K S")
    budget_rules: ClassVar[tuple[str, ...]] = ("equal", "adaptive", "global")

    def __post_init__(self) -> None:
        if min(self.sinks, self.window) < 0:
            raise UserError(
                f"sinks and window must be 0 or more, got {self.sinks} and {self.window}; try "
                "sinks=4,window=0"
            )
        base.check_capacity(self.capacity, self.start, sinks=self.sinks, window=self.window)
        if self.rows < 0 or (self.rows and self.budgets != "global"):
            raise UserError(
                f"rows must be 0 or more, for budgets=global, got {self.rows} with "
                f"budgets={self.budgets}; leave it out"
            )
        if self.function is not None and self.budgets == "global":
            raise UserError(
                "budgets=global needs the scores of all layers, got a function; take adaptive"
            )
        super().__post_init__()

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(self.sinks, self.window)

    @property
    def layer_budgets(self) -> LayerBudgets | None:
        if self.budgets != "global":
            return None
        return LayerBudgets((), max(1, self.rows), self.rows, 0)

    def statistics(self, spec: Spec, batch: int) -> Float32[Array, "B K S"]:
        """The scores that are set: NaN for each slot; none where a function computes them."""
        slots = self.start if self.function is None else 0
        return jnp.full((batch, spec.kv_heads, slots), jnp.nan, jnp.float32)

    def reserve(self, spec: Spec, state: CompressedState, tokens: int) -> CompressedState:
        state = super().reserve(spec, state, tokens)
        if prefill_finished(state) or self.function is not None:
            return state
        scores, slots = state.statistics, state.dense.positions.shape[1]
        padding = ((0, 0), (0, 0), (0, slots - scores.shape[2]))
        return state._replace(statistics=jnp.pad(scores, padding, constant_values=jnp.nan))

    def with_scores(
        self, state: CompressedState, scores: ArrayLike, head_budgets: ArrayLike | None = None
    ) -> CompressedState:
        """The state with the scores [B,K,S] of its tokens, in their order.

        head_budgets: the number of tokens [B,K] that each KV head keeps, for budgets=global.
        Raises UserError for scores of another shape, for fewer scores than tokens, for NaN, and for
        budgets that do not fit.
        """
        check_scores(scores, state.statistics.shape, state.dense.count)
        set_scores = state.statistics.at[:, :, : scores.shape[2]].set(scores)
        state = state._replace(statistics=set_scores)
        if self.budgets != "global" and head_budgets is None:
            return state
        self._check_head_budgets(head_budgets, scores.shape[:2])
        return state._replace(head_budgets=jnp.asarray(head_budgets, jnp.int32))

    def _check_head_budgets(self, head_budgets: ArrayLike | None, shape: tuple[int, int]) -> None:
        if self.budgets != "global" or head_budgets is None or head_budgets.shape != shape:
            got = None if head_budgets is None else list(head_budgets.shape)
            raise UserError(
                f"head_budgets [B,K] of shape {list(shape)} belong to budgets=global, got {got} "
                f"with budgets={self.budgets}; give those of `global_budgets`"
            )
        if isinstance(head_budgets, jax.core.Tracer):
            return
        largest = int(np.sum(head_budgets, axis=1).max(initial=0))
        if np.min(head_budgets, initial=0) < 0 or largest > self.rows:
            raise UserError(
                f"head_budgets must be 0 or more, of at most rows={self.rows} together, got "
                f"{largest}; raise rows"
            )

    def score(self, spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K C"]:
        if self.function is None:
            return tokens.statistics[:, :, tokens.slots]
        score = self.function(spec, tokens)
        expected = (*tokens.stored.k.shape[:2], tokens.scored.shape[2])
        if score.shape != expected:
            raise UserError(
                f"function must return [B,K,C], a score for each token between the ends, of shape "
                f"{list(expected)}, got {list(score.shape)}; cut it by [:, :, tokens.slots]"
            )
        return score

    def choose(
        self, spec: Spec, state: CompressedState, tokens: PerHeadTokens, count: Array
    ) -> base.Chosen:
        score = self.prompt_score(spec, state)
        scored = jnp.arange(score.shape[2])[None, None] < count[:, None, None]
        unknown = jnp.any(jnp.isnan(score) & scored, axis=(1, 2))[:, None, None]
        chosen, weight = self.keep_best(state, tokens, count, jnp.where(unknown, 0.0, score))
        return chosen, jnp.where(unknown, jnp.nan, weight)


def check_scores(scores: ArrayLike, slots: tuple[int, int, int], count: Int32[Array, " B"]) -> None:
    """Raise UserError for scores that do not fit these slots, and outside of compiled code for NaN
    and for scores of fewer than the longest sequence's tokens.

    count: tokens of each sequence.
    """
    shape = tuple(scores.shape)
    if len(shape) != 3 or shape[:2] != slots[:2] or shape[2] > slots[2]:
        raise UserError(
            f"scores must be [B,K,S] with B={slots[0]}, K={slots[1]} and S of at most {slots[2]} "
            f"slots, got {list(shape)}; give one for each token of the prompt"
        )
    if any(isinstance(array, jax.core.Tracer) for array in (scores, count)):
        return
    if shape[2] < (tokens := int(np.max(count))):
        raise UserError(
            f"scores must be one for each of {tokens} tokens, got {shape[2]}; give all of them"
        )
    if np.isnan(np.asarray(scores)).any():
        raise UserError("scores must be numbers, got NaN; check what computes them")


def global_budgets(scores: Float32[np.ndarray, "L K S"], budget: int) -> Integer[np.ndarray, "L K"]:
    """How many of the largest scores of all layers together each KV head of each layer has.

    scores: of the tokens between the ends. budget: the mean number of tokens of a KV head.
    """
    layers, kv_heads, size = scores.shape
    best = np.argsort(-scores, axis=None, kind="stable")[: layers * kv_heads * min(budget, size)]
    return np.bincount(best // size, minlength=layers * kv_heads).reshape(layers, kv_heads)
