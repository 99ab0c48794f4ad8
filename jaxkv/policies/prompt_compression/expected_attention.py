"""Expected attention (Devoto et al. 2025): what later queries will probably attend to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv import rows
from jaxkv.contract import Chunk, Leaf, Spec
from jaxkv.errors import UserError, check_int
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import (
    Budgets,
    CompressionPolicy,
    ExactEnds,
    Positions,
    ScoredTokens,
)
from jaxkv.policies.prompt_compression.head_shares import LayerBudgets
from jaxkv.rows import Storage
from jaxkv.typing import Array, Float32, Int32, UInt32

HIGHEST = jax.lax.Precision.HIGHEST
_MAX_COUNT = 2**31 - 1
MAX_FUTURE = 65_536  # positions over which queries are averaged; all their rotations are in memory


class QueryMoments(NamedTuple):
    """Of the queries after the sinks, before rotation. count: of all tokens, up to 2^31 - 1."""

    mean: Float32[Array, "B K M G H"]  # M is 1
    covariance: Float32[Array, "B K J G H"]  # J is H
    count: Int32[Array, "B C"]  # C is 1


LEAVES = QueryMoments(Leaf("B K M G H"), Leaf("B K J G H"), Leaf("B C", shared=True))


@dataclass(frozen=True)
class ExpectedAttention(CompressionPolicy):
    """Keep a prompt's first `sinks` tokens and those that later queries are expected to attend to.

    The queries of a head are close to normally distributed. So the queries of the prompt predict
    those that come later, and the expectation of exp(logit) has a closed form (section 2.2). The
    score uses all queries of the prompt, so it hardly depends on how the prompt ends.

    The mean and covariance of the prompt's queries, without those of the sinks, are rotated by the
    mean rotation of the next `future` positions. They give each key's logit a mean and a variance.
    The expected attention is the softmax of mean + variance / 2 (equations 7 and 8), averaged over
    the query heads of a KV head. The score is (expected attention + epsilon) x length of the value
    (equation 9). A softcap of the model is ignored in the score.

    The compressed prompt has `capacity` tokens, sinks included; generated tokens are cached
    exactly. A prompt of at most `capacity` tokens is not compressed. budgets, calibration,
    every, positions: as in keydiff. start: slots before the prompt, doubled as they fill. storage:
    as in streaming. The other defaults are those of the published code.
    """

    capacity: int = 1024
    sinks: int = 4
    future: int = 512
    epsilon: float = 0.0
    budgets: Budgets = "equal"
    calibration: str | None = None
    every: int | None = None
    positions: Positions = None
    start: int = 512
    storage: Storage = "float"
    layer_budgets: LayerBudgets | None = field(default=None, repr=False)  # set by `for_layer`

    summary: ClassVar[str] = "the tokens of a prompt that later queries are expected to attend to"
    source: ClassVar[str] = "Expected Attention, arXiv 2510.00636"
    statistics_leaves: ClassVar[QueryMoments] = LEAVES

    def __post_init__(self) -> None:
        if self.sinks < 0 or not 0 <= self.epsilon < math.inf:
            raise UserError(
                f"sinks and epsilon must be 0 or more, got {self.sinks} and {self.epsilon}; try "
                "sinks=4,epsilon=0"
            )
        check_int("future", self.future, 1, MAX_FUTURE)
        base.check_capacity(self.capacity, self.start, sinks=self.sinks)
        super().__post_init__()

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(self.sinks, 0)

    def statistics(self, spec: Spec, batch: int) -> QueryMoments:
        base.check_group(spec)
        sizes = (1, spec.head_dim)
        moments = (
            jnp.zeros((batch, spec.kv_heads, size, spec.group, spec.head_dim), jnp.float32)
            for size in sizes
        )
        return QueryMoments(*moments, jnp.zeros((batch, 1), jnp.int32))

    def observe(self, spec: Spec, statistics: QueryMoments, chunk: Chunk) -> QueryMoments:
        """The mean and covariance with those of the chunk's queries merged in."""
        state, tokens = statistics, jnp.cumsum(chunk.valid, axis=1, dtype=jnp.int32)
        counted = chunk.valid & (jnp.minimum(state.count, self.sinks) + tokens > self.sinks)
        before = jnp.maximum(state.count[:, 0] - self.sinks, 0).astype(jnp.float32)
        new = jnp.sum(counted, axis=1, dtype=jnp.int32).astype(jnp.float32)
        column = lambda x: x[:, None, None, None, None]
        batch, kv_heads, _, group, head_dim = state.mean.shape
        q = chunk.q.astype(jnp.float32).reshape(batch, -1, kv_heads, group, head_dim)
        q, valid = q.transpose(0, 2, 1, 3, 4), counted[:, None, :, None, None]
        divisor = column(jnp.maximum(new, 1.0))
        mean = jnp.sum(jnp.where(valid, q, 0.0), axis=2, keepdims=True) / divisor
        centred = jnp.where(valid, q - mean, 0.0)
        covariance = jnp.einsum("bktgd,bktgh->bkdgh", centred, centred, precision=HIGHEST) / divisor
        # The difference of the two means merges both covariances without cancellation.
        # Both shares are quotients: a GPU divides inexactly, so 1 - new_share might not be 0.
        total, mean_difference = jnp.maximum(before + new, 1.0), mean - state.mean
        new_share, old_share = column(new / total), column(before / total)
        outer = mean_difference[:, :, 0, :, :, None].transpose(0, 1, 3, 2, 4) * mean_difference
        merged = (
            state.covariance
            + (covariance - state.covariance) * new_share
            + outer * new_share * old_share
        )
        has_new = column(new > 0)
        return QueryMoments(
            jnp.where(has_new, state.mean + mean_difference * new_share, state.mean),
            jnp.where(has_new, merged, state.covariance),
            jnp.minimum(state.count, _MAX_COUNT - tokens[:, -1:]) + tokens[:, -1:],
        )

    def score(self, spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K C"]:
        """The logarithm of each token's score: most softmax weights of a sharp head underflow."""
        state, after = tokens.statistics, tokens.newest_position + jnp.uint32(1)
        between = jax.tree.map(lambda leaf: leaf[:, :, tokens.slots], tokens.seen)
        rotation = self._mean_rotation(spec, after)
        keys = rows.dequantise(between.k).astype(jnp.float32)
        mean = jnp.einsum("bkmgx,bxh->bkgh", state.mean, rotation, precision=HIGHEST)
        logits = jnp.einsum("bkgh,bksh->bkgs", mean, keys, precision=HIGHEST)
        logits = jnp.float32(spec.scale) * logits
        covariance = jnp.einsum(
            "bkygx,bxh,byd->bkgdh", state.covariance, rotation, rotation, precision=HIGHEST
        )
        products = jnp.einsum("bkgdh,bksh->bkgsd", covariance, keys, precision=HIGHEST)
        variance = jnp.sum(products * keys[:, :, None], axis=-1)
        logits += jnp.float32(spec.scale**2 / 2) * variance
        penalty = spec.encoding.bias(after, between.positions, keys.shape[1])
        logits = logits if penalty is None else logits + penalty[:, :, :, 0]
        logits = jnp.where(tokens.scored[:, :, None], logits, -jnp.inf)
        shares = jax.nn.log_softmax(logits, axis=-1)
        score = jax.nn.logsumexp(shares, axis=2) - jnp.float32(math.log(shares.shape[2]))
        epsilon = math.log(self.epsilon) if self.epsilon else -math.inf
        length = jnp.sqrt(
            jnp.sum(jnp.square(rows.dequantise(between.v).astype(jnp.float32)), axis=-1)
        )
        return jnp.logaddexp(score, jnp.float32(epsilon)) + jnp.log(length)

    def _mean_rotation(self, spec: Spec, after: UInt32[Array, "B 1"]) -> Float32[Array, "B H H"]:
        """The mean rotation of the positions from `after` on; a query times it is rotated."""
        positions = after + jnp.arange(self.future, dtype=jnp.uint32)[None]
        basis = jnp.eye(spec.head_dim, dtype=jnp.float32)[None, None]
        basis = jnp.broadcast_to(basis, (*positions.shape, spec.head_dim, spec.head_dim))
        return jnp.mean(spec.encoding.rotate(basis, positions), axis=1)
