"""Expected attention (Devoto et al. 2025): what later queries will probably attend to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv import rows
from jaxkv.cache import ring
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Cached, Chunk, Leaf, Partial, Spec, prefill_finished
from jaxkv.errors import UserError
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import (
    Budgets,
    CompressedState,
    CompressionPolicy,
    ExactEnds,
)
from jaxkv.rows import Storage
from jaxkv.typing import Array, Float32, Int32, UInt32

HIGHEST = jax.lax.Precision.HIGHEST


class ExpectedState(NamedTuple):
    """prompt: the tokens. mean, covariance: of the queries after the sinks, before rotation.

    M is 1 and J is H before the end of prefill; both are 0 after it.
    """

    prompt: CompressedState
    mean: Float32[Array, "B K M G H"]
    covariance: Float32[Array, "B K J G H"]


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
    (equation 9). covariance: add the variance. value_norm: multiply by the length of the value. A
    softcap of the model is ignored in the score.

    The compressed prompt has `capacity` tokens, sinks included; generated tokens are cached
    exactly. A prompt of at most `capacity` tokens is not compressed. budgets: as in keydiff. start:
    slots before the prompt, doubled as they fill. storage: as in streaming. The other defaults are
    those of the published code.
    """

    capacity: int = 1024
    sinks: int = 4
    future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    budgets: Budgets = "equal"
    start: int = 512
    storage: Storage = "float"

    summary: ClassVar[str] = "the tokens of a prompt that later queries are expected to attend to"
    source: ClassVar[str] = "Expected Attention, arXiv 2510.00636"

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.future < 1 or not 0 <= self.epsilon < math.inf:
            raise UserError(
                f"sinks and epsilon must be 0 or more and future at least 1, got {self.sinks}, "
                f"{self.epsilon} and {self.future}; try sinks=4,epsilon=0,future=512"
            )
        base.check_capacity(self.capacity, self.sinks + 1, self.start)
        super().__post_init__()

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(self.sinks, 0)

    @property
    def leaves(self) -> ExpectedState:
        return ExpectedState(super().leaves, Leaf("B K M G H"), Leaf("B K J G H"))

    @property
    def min_prompt(self) -> int:
        return self.capacity + 1

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> ExpectedState:
        base.check_group(spec)
        prompt, heads = super().init(spec, batch, rng), (batch, spec.kv_heads)
        sizes = (1, spec.head_dim)
        moments = (
            jnp.zeros((*heads, size, spec.group, spec.head_dim), jnp.float32) for size in sizes
        )
        return ExpectedState(prompt, *moments)

    def reserve(self, spec: Spec, state: ExpectedState, tokens: int) -> ExpectedState:
        return state._replace(prompt=super().reserve(spec, state.prompt, tokens))

    def cached(self, spec: Spec, state: ExpectedState) -> Cached:
        return super().cached(spec, state.prompt)

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        base.check_group(spec)
        heads, head_dim = spec.kv_heads * spec.group, spec.head_dim
        return super().bytes_per_sequence(spec, tokens) + 4 * heads * head_dim * (head_dim + 1)

    def update(
        self, spec: Spec, state: ExpectedState, chunk: Chunk
    ) -> tuple[Partial, ExpectedState]:
        seen, after = super().update(spec, state.prompt, chunk)
        if not prefill_finished(state.prompt):
            state = self._add_queries(state, chunk)
        return seen, state._replace(prompt=after)

    def _add_queries(self, state: ExpectedState, chunk: Chunk) -> ExpectedState:
        """The state with the mean and covariance of the chunk's queries merged into its own."""
        counted = ring.token_numbers(state.prompt.dense, chunk.valid) >= self.sinks
        before = jnp.maximum(state.prompt.dense.count - self.sinks, 0).astype(jnp.float32)
        new = jnp.sum(counted, axis=1, dtype=jnp.int32).astype(jnp.float32)
        column = lambda x: x[:, None, None, None, None]  # noqa: E731
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
        return state._replace(
            mean=jnp.where(has_new, state.mean + mean_difference * new_share, state.mean),
            covariance=jnp.where(has_new, merged, state.covariance),
        )

    def finish_prefill(self, spec: Spec, state: ExpectedState) -> ExpectedState:
        choose = partial(self.choose, spec, jax.lax.stop_gradient(state))
        prompt = base.compress(state.prompt, self.ends, choose)
        return ExpectedState(prompt, state.mean[:, :, :0], state.covariance[:, :, :0])

    def choose(
        self, spec: Spec, state: ExpectedState, tokens: PerHeadTokens, count: Array
    ) -> base.Chosen:
        # A choice has no gradient.
        score = self._score(spec, state, jax.lax.stop_gradient(tokens), count)
        return base.keep_best(tokens, count, score, self.capacity - self.sinks, self.budgets)

    def _score(
        self, spec: Spec, state: ExpectedState, tokens: PerHeadTokens, count: Int32[Array, " B"]
    ) -> Float32[Array, "B K S"]:
        """The logarithm of each token's score: most softmax weights of a sharp head underflow."""
        written = state.prompt.dense.count[:, None]
        slots = state.prompt.dense.positions
        last = jnp.take_along_axis(slots, jnp.clip(written - 1, 0, slots.shape[1] - 1), axis=1)
        after = last + jnp.uint32(1)
        rotation = self._mean_rotation(spec, after)
        keys = rows.dequantise(tokens.k).astype(jnp.float32)
        mean = jnp.einsum("bkmgx,bxh->bkgh", state.mean, rotation, precision=HIGHEST)
        logits = jnp.einsum("bkgh,bksh->bkgs", mean, keys, precision=HIGHEST)
        logits = jnp.float32(spec.scale) * logits
        if self.covariance:
            covariance = jnp.einsum(
                "bkygx,bxh,byd->bkgdh", state.covariance, rotation, rotation, precision=HIGHEST
            )
            products = jnp.einsum("bkgdh,bksh->bkgsd", covariance, keys, precision=HIGHEST)
            variance = jnp.sum(products * keys[:, :, None], axis=-1)
            logits += jnp.float32(spec.scale**2 / 2) * variance
        penalty = spec.encoding.bias(after, tokens.positions, keys.shape[1])
        logits = logits if penalty is None else logits + penalty[:, :, :, 0]
        valid = jnp.arange(keys.shape[2])[None] < count[:, None]
        logits = jnp.where(valid[:, None, None], logits, -jnp.inf)
        shares = jax.nn.log_softmax(logits, axis=-1)
        score = jax.nn.logsumexp(shares, axis=2) - jnp.float32(math.log(shares.shape[2]))
        if not self.value_norm:
            return score
        epsilon = math.log(self.epsilon) if self.epsilon else -math.inf
        length = jnp.sqrt(
            jnp.sum(jnp.square(rows.dequantise(tokens.v).astype(jnp.float32)), axis=-1)
        )
        return jnp.logaddexp(score, jnp.float32(epsilon)) + jnp.log(length)

    def _mean_rotation(self, spec: Spec, after: UInt32[Array, "B 1"]) -> Float32[Array, "B H H"]:
        """The mean rotation of the positions from `after` on; a query times it is rotated."""
        positions = after + jnp.arange(self.future, dtype=jnp.uint32)[None]
        basis = jnp.eye(spec.head_dim, dtype=jnp.float32)[None, None]
        basis = jnp.broadcast_to(basis, (*positions.shape, spec.head_dim, spec.head_dim))
        return jnp.mean(spec.encoding.rotate(basis, positions), axis=1)
