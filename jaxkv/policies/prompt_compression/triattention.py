"""TriAttention (Mao et al. 2026): keys scored by the centres of queries before rotation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv import rows
from jaxkv.contract import Chunk, Leaf, Spec
from jaxkv.errors import UserError
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
from jaxkv.typing import Array, Float, Float32, Int32

_MAX_COUNT = 2**31 - 1
_SMALLEST_SPREAD = 1e-6  # of scores, as in the published code


class QueryCentres(NamedTuple):
    """Of all queries so far, before rotation. M is 1.

    mean: their mean. length: the mean length of each of their F pairs of dimensions, which the
    encoding rotates. count: tokens, up to 2^31 - 1; C is 1.
    """

    mean: Float32[Array, "B K M G H"]
    length: Float32[Array, "B K M G F"]
    count: Int32[Array, "B C"]


@dataclass(frozen=True)
class TriAttention(CompressionPolicy):
    """Cache the tokens that the mean query of a head, at later positions, would attend to.

    Before rotation the queries of a head lie near a centre. Rotation turns the product of a centre
    and a key into a trigonometric series in their distance, so the centres tell at which distances
    a head attends, whatever the latest queries are.

    The score of a key is the mean, over distances of 1, 2, 4, ... up to `furthest` from the next
    position, of its product with the centre rotated there. Added is the part of queries that their
    centre does not tell: per pair of dimensions the length of the key times the mean length of the
    queries minus the length of their mean. Scores are normalised over the tokens to mean 0 and
    standard deviation 1, and the highest of the query heads of a KV head counts.

    After the authors' code (github.com/WeianMao/triattention, version 0.2.0) with its option of
    pruning per layer and head; by default its layers share one choice. The code takes the centres
    from a calibration text and keeps the prompt. Here they are the mean of all queries so far, and
    a prompt is compressed like any text. The authors' server, and not their code for transformers'
    models, keeps the newest 128 tokens; here `window` keeps the newest. Their positions are those
    of the text, here positions=absolute. A distance penalty (ALiBi) is added; a softcap is ignored.
    A model that rotates a part of each head is refused.
    The authors' server disables prefix caching, and TensorRT-LLM's port never evicts the prompt.
    Here a snapshot of a prefix has the centres too.

    capacity, every, positions, budgets, calibration: as in keydiff. 128 tokens is the published
    interval. start: slots before the prompt, doubled as they fill. storage: as in streaming.
    """

    capacity: int = 1024
    window: int = 0
    furthest: int = 65536
    budgets: Budgets = "equal"
    calibration: str | None = None
    every: int | None = 128
    positions: Positions = None
    start: int = 512
    storage: Storage = "float"
    layer_budgets: LayerBudgets | None = field(default=None, repr=False)  # set by `for_layer`

    summary: ClassVar[str] = "the tokens that the mean query of a head would attend to later"
    source: ClassVar[str] = "TriAttention, arXiv 2604.04921"
    statistics_leaves: ClassVar[QueryCentres] = QueryCentres(
        Leaf("B K M G H"), Leaf("B K M G F"), Leaf("B C", shared=True)
    )

    def __post_init__(self) -> None:
        if self.window < 0:
            raise UserError(f"window must be 0 or more, got {self.window}; try window=128")
        base.check_capacity(self.capacity, self.start, window=self.window)
        if not 1 <= self.furthest < 2**31:
            raise UserError(
                f"furthest must be from 1 to 2^31 - 1, got {self.furthest}; try furthest=65536"
            )
        super().__post_init__()

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(0, self.window)

    def statistics(self, spec: Spec, batch: int) -> QueryCentres:
        base.check_group(spec)
        if spec.head_dim % 2:
            raise UserError(
                f"triattention scores pairs of dimensions, got head dim {spec.head_dim}; take "
                "another policy, such as keydiff"
            )
        if getattr(spec.encoding, "head_dim", None) is not None:
            raise UserError(
                "triattention scores pairs of dimensions that all rotate, got a model that rotates "
                "a part of them; take another policy, such as keydiff"
            )
        shape = batch, spec.kv_heads, 1, spec.group
        return QueryCentres(
            jnp.zeros((*shape, spec.head_dim), jnp.float32),
            jnp.zeros((*shape, spec.head_dim // 2), jnp.float32),
            jnp.zeros((batch, 1), jnp.int32),
        )

    def observe(self, spec: Spec, statistics: QueryCentres, chunk: Chunk) -> QueryCentres:
        """The running means with the queries of a chunk."""
        batch, kv_heads, _, group, head_dim = statistics.mean.shape
        q = chunk.q.astype(jnp.float32).reshape(batch, -1, kv_heads, group, head_dim)
        q = q.transpose(0, 2, 1, 3, 4)
        new = jnp.sum(chunk.valid, axis=1, keepdims=True, dtype=jnp.int32)
        count = jnp.minimum(statistics.count, _MAX_COUNT - new) + new
        total = jnp.maximum(count, 1).astype(jnp.float32)[:, :, None, None, None]
        valid = chunk.valid[:, None, :, None, None]

        def updated(mean: Array, values: Array) -> Array:
            change = jnp.sum(jnp.where(valid, values - mean, 0.0), axis=2, keepdims=True)
            return mean + change / total

        return QueryCentres(
            updated(statistics.mean, q), updated(statistics.length, pair_lengths(q)), count
        )

    def score(self, spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K C"]:
        centres, after = tokens.statistics, tokens.newest_position + jnp.uint32(1)
        between = jax.tree.map(lambda leaf: leaf[:, :, tokens.slots], tokens.seen)
        k = rows.dequantise(between.k).astype(jnp.float32)
        highest = jax.lax.Precision.HIGHEST
        series = jnp.einsum(
            "bkgh,bksh->bkgs", self._rotated(spec, centres.mean, after), k, precision=highest
        )
        spread = (centres.length - pair_lengths(centres.mean))[:, :, 0]
        spread = spread * jnp.float32(getattr(spec.encoding, "amplitude", 1.0))
        rest = jnp.einsum("bkgf,bksf->bkgs", spread, pair_lengths(k), precision=highest)
        score = jnp.float32(spec.scale) * (series + rest)
        penalty = spec.encoding.bias(after, between.positions, k.shape[1])
        score = score if penalty is None else score + penalty[:, :, :, 0]
        return jnp.max(_normalised(score, tokens.scored[:, :, None], spec.scale), axis=2)

    def _rotated(
        self, spec: Spec, mean: Float32[Array, "B K M G H"], after: Array
    ) -> Float32[Array, "B K G H"]:
        """The centres rotated to later positions, on average."""
        offsets = 1 << jnp.arange(self.furthest.bit_length(), dtype=jnp.uint32)
        batch, kv_heads, _, group, head_dim = mean.shape
        heads = jnp.broadcast_to(
            mean.reshape(batch, 1, kv_heads * group, head_dim),
            (batch, offsets.shape[0], kv_heads * group, head_dim),
        )
        rotated = jnp.mean(spec.encoding.rotate(heads, after + offsets[None]), axis=1)
        return rotated.reshape(batch, kv_heads, group, head_dim)


def pair_lengths(x: Float[Array, "... H"]) -> Float[Array, "... F"]:
    """The length of each pair (i, i + H/2) of dimensions."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.sqrt(first * first + second * second)


def _normalised(
    score: Float32[Array, "B K G S"], valid: Array, unit: float
) -> Float32[Array, "B K G S"]:
    """Scores with mean 0 and standard deviation 1 over the valid tokens.

    unit: the factor on the scores, with which the smallest spread is scaled, too.
    """
    count = jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True), 1).astype(jnp.float32)
    mean = jnp.sum(jnp.where(valid, score, 0.0), axis=-1, keepdims=True) / count
    centred = jnp.where(valid, score - mean, 0.0)
    spread = jnp.sqrt(jnp.sum(centred * centred, axis=-1, keepdims=True) / count)
    return centred / jnp.maximum(spread, jnp.float32(_SMALLEST_SPREAD * unit))
