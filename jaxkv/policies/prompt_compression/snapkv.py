"""SnapKV (Li et al. 2024): the tokens of a finished prompt that its last queries attend to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import rows
from jaxkv.contract import Chunk, Leaf, Spec
from jaxkv.errors import UserError, check_choice
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
from jaxkv.typing import Array, Bool, Float, Float32, UInt32

MAX_KERNEL = 1023  # neighbours; the time of pooling grows with them


class LastQueries(NamedTuple):
    """The last W queries, rotated to their positions."""

    q: Float[Array, "B K W G H"]
    positions: UInt32[Array, "B W"]


LEAVES = LastQueries(Leaf("B K W G H"), Leaf("B W", shared=True))


@dataclass(frozen=True)
class SnapKV(CompressionPolicy):
    """Keep a prompt's last `window` tokens and the tokens before them that these attend to most.

    The answer attends largely to the same tokens as the end of the prompt (section 3). So the
    attention of the last queries, the observation window, selects the tokens to keep.

    The compressed prompt has `capacity` tokens; generated tokens are cached exactly. Attention is
    summed over the last `window` queries, pooled over `kernel` neighbours, and averaged over the
    query heads of a KV head. The model's sink logits are left out of the attention. pool: max or
    mean over the neighbours. The defaults are those of the published LongBench runs. A prompt of at
    most `capacity` tokens is not compressed. budgets, calibration, every, positions: as in keydiff.
    start: slots before the prompt, doubled as they fill. storage: as in streaming.
    """

    capacity: int = 1024
    window: int = 32
    kernel: int = 7
    pool: Literal["max", "mean"] = "max"
    budgets: Budgets = "equal"
    calibration: str | None = None
    every: int | None = None
    positions: Positions = None
    start: int = 512
    storage: Storage = "float"
    layer_budgets: LayerBudgets | None = field(default=None, repr=False)  # set by `for_layer`

    summary: ClassVar[str] = "the tokens of a prompt that its last queries attend to"
    source: ClassVar[str] = "SnapKV, arXiv 2404.14469"
    statistics_leaves: ClassVar[LastQueries] = LEAVES

    def __post_init__(self) -> None:
        base.check_ends(self.ends, self.start, "window=32")
        super().__post_init__()
        base.check_capacity(self.capacity, self.start, window=self.window)
        check_kernel(self.kernel)
        check_choice("pool", self.pool, ("max", "mean"))

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(0, self.window)

    def statistics(self, spec: Spec, batch: int) -> LastQueries:
        return no_queries(spec, batch, self.window)

    def observe(self, spec: Spec, statistics: LastQueries, chunk: Chunk) -> LastQueries:
        return with_queries(spec, statistics, chunk)

    def score(self, spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K C"]:
        attention = attention_of_last_queries(spec, tokens)[..., tokens.slots]
        attention = jnp.where(tokens.scored[:, :, None], attention, 0)
        return jnp.mean(pooled(attention, self.kernel, self.pool), axis=2)


def pooled(
    score: Float32[Array, "B K G S"], kernel: int, pool: Literal["max", "mean"]
) -> Float32[Array, "B K G S"]:
    """Pooled over neighbours. A mean counts places beyond the ends as zeros."""
    start, combine = (0.0, jax.lax.add) if pool == "mean" else (-np.inf, jax.lax.max)
    side = kernel // 2
    result = jax.lax.reduce_window(
        score,
        jnp.float32(start),
        combine,
        (1, 1, 1, kernel),
        (1, 1, 1, 1),
        ((0, 0), (0, 0), (0, 0), (side, side)),
    )
    return result / jnp.float32(kernel) if pool == "mean" else result


def check_kernel(kernel: int) -> None:
    """Raise UserError unless a token has as many neighbours before it as after it."""
    if not 1 <= kernel <= MAX_KERNEL or kernel % 2 == 0:
        raise UserError(
            f"kernel must be one of 1, 3, 5 to {MAX_KERNEL}, got {kernel}; try kernel=7"
        )


def no_queries(spec: Spec, batch: int, window: int) -> LastQueries:
    """Zeros in place of the last `window` queries."""
    base.check_group(spec)
    shape = batch, spec.kv_heads, window, spec.group, spec.head_dim
    return LastQueries(jnp.zeros(shape, jnp.float32), jnp.zeros((batch, window), jnp.uint32))


def with_queries(spec: Spec, last: LastQueries, chunk: Chunk) -> LastQueries:
    """The last W queries, those of the chunk among them."""
    batch, kv_heads, num_queries, group, head_dim = last.q.shape
    q = spec.encoding.rotate(chunk.q.astype(jnp.float32), chunk.positions)
    q = q.reshape(batch, -1, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    queries = jnp.concatenate([last.q, q], axis=2)
    positions = jnp.concatenate([last.positions, chunk.positions], axis=1)
    valid = jnp.concatenate([jnp.ones((batch, num_queries), bool), chunk.valid], axis=1)
    order = jnp.argsort(~valid, axis=1, stable=True)  # valid queries first
    new = jnp.sum(chunk.valid, axis=1, dtype=jnp.int32)[:, None]
    newest = jnp.take_along_axis(order, new + jnp.arange(num_queries)[None], axis=1)
    return LastQueries(
        jnp.take_along_axis(queries, newest[:, None, :, None, None], axis=2),
        jnp.take_along_axis(positions, newest, axis=1),
    )


def attention_of_last_queries(spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K G S"]:
    """The attention that each cached token gets from the last queries, summed over them."""
    last, slot = tokens.statistics, jnp.arange(tokens.seen.positions.shape[2])
    # The j-th of the last queries belongs to token count - W + j and sees the tokens up to it.
    num_queries = last.q.shape[2]
    number = tokens.count[..., None] - num_queries + jnp.arange(num_queries)[None, None]
    visible = slot[None, None, None] <= number[..., None]
    return jnp.sum(shares(logits_of_last_queries(spec, tokens), visible[:, :, None]), axis=3)


def logits_of_last_queries(spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K G W S"]:
    """The logits of the last queries and all cached tokens."""
    last, seen_tokens = tokens.statistics, tokens.seen
    logits = jnp.einsum(
        "bkwgh,bksh->bkgws",
        last.q,
        rows.dequantise(seen_tokens.k).astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    ) * jnp.float32(spec.scale)
    if spec.softcap is not None:
        logits = jnp.float32(spec.softcap) * jnp.tanh(logits / jnp.float32(spec.softcap))
    penalty = spec.encoding.bias(last.positions, seen_tokens.positions, last.q.shape[1])
    return logits if penalty is None else logits + penalty


def shares(
    logits: Float32[Array, "B K #G W S"], visible: Bool[Array, "#B #K #G #W S"]
) -> Float32[Array, "B K #G W S"]:
    """The softmax over the tokens that are visible; zeros where none is."""
    top = jnp.max(jnp.where(visible, logits, -jnp.inf), axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(logits - jnp.where(top == -jnp.inf, 0.0, top)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1.0, total)
