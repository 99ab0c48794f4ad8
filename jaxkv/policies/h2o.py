"""H2O (Zhang et al. 2023): the newest tokens, and the heavy hitters among those before them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import sample as drawn
from jaxkv.attention import blend, local_attention, merge, scores
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.sample import Sample
from jaxkv.typing import Array, Bool, Float32, Int32


class H2OState(NamedTuple):
    """sample: the tokens kept, in no order. score: the attention that each was given so far, summed
    over the query heads of its kv head. count: how many slots are taken."""

    sample: Sample
    score: Float32[Array, "B K S"]
    count: Int32[Array, " B"]


class Scores(NamedTuple):
    """What the queries of a chunk gave to the tokens held, and to those of the chunk. Of a chunk of
    one token held is the score of each slot from then on, and new is empty."""

    held: Float32[Array, "B K S"]
    new: Float32[Array, "B K T"]


@dataclass(frozen=True)
class H2O:
    """Keep the newest `window` tokens and, of all before them, the `heavy` that were attended most.

    A token's score is the softmax weight it got from every query so far, sink logits of the model
    left out; when a token comes, the one of least score leaves that is not among the newest (the
    published code attends first and so sees one token more). A larger chunk is scored as a whole
    before anything leaves. Positions are those in the text. As many slots as the other defaults
    here; the paper's are a tenth of the prompt for each half.
    """

    heavy: int = 128
    window: int = 128

    summary: ClassVar[str] = "the newest tokens, and those before them that got most attention"
    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    formula: ClassVar[str] = "(heavy + window) * K * (2 * H * itemsize + 8) + 4"
    axes: ClassVar[H2OState] = H2OState(drawn.AXES, ("B", "K", "S"), ("B",))
    shared: ClassVar[tuple[str, ...]] = ("count",)
    reach: ClassVar[float] = math.inf
    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.heavy < 1 or self.window < 1:
            raise UserError(
                f"heavy and window must be at least 1, got {self.heavy} and {self.window}; try "
                "heavy=128,window=128"
            )

    @property
    def slots(self) -> int:
        return self.heavy + self.window

    def init(self, spec: Spec, rows: int, key: jax.Array) -> H2OState:
        return H2OState(
            drawn.init(spec, rows, self.slots),
            jnp.zeros((rows, spec.kv_heads, self.slots), jnp.float32),
            jnp.zeros((rows,), jnp.int32),
        )

    def attend(self, spec: Spec, state: H2OState, chunk: Chunk) -> tuple[Partial, Scores]:
        if chunk.valid.shape[1] == 1:
            whole, after = self.decode(spec, state, chunk)
            return whole, Scores(after.score, after.score[:, :, :0])
        bias = self._bias(spec, state, chunk, self._held(state))
        q = spec.encoding.rotate(chunk.q, chunk.positions)
        logits = scores(q, state.sample.k, spec.scale, spec.softcap) + bias
        whole = merge(blend(logits, state.sample.v), local_attention(spec, chunk))
        return whole, Scores(_shares(logits, whole), self._local(spec, chunk, whole))

    def extend(
        self, spec: Spec, state: H2OState, chunk: Chunk, scores: Scores | None = None
    ) -> H2OState:
        if scores is None:
            raise UserError(
                "h2o keeps what queries attend to, got no scores; give those that attend returned, "
                "as jaxkv.step does"
            )
        if chunk.valid.shape[1] == 1:
            return self._put(spec, state, chunk)._replace(score=scores.held)
        score = jnp.concatenate([state.score + scores.held, scores.new], axis=2)
        there = jnp.concatenate(
            [self._held(state), jnp.broadcast_to(chunk.valid[:, None], scores.new.shape)], axis=2
        )
        tokens = drawn.join(state.sample, _tokens(spec, chunk, state.sample))
        last = jnp.max(jnp.where(chunk.valid, jnp.arange(chunk.valid.shape[1])[None], -1), axis=1)
        newest = jnp.take_along_axis(chunk.positions, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
        rank = jnp.where(self._new(tokens, newest), jnp.inf, score)
        # What is held stands first: where scores are alike the older stays.
        _, best = jax.lax.top_k(jnp.where(there, rank, -jnp.inf), self.slots)
        new = jnp.sum(chunk.valid, axis=1, dtype=jnp.int32)
        after = H2OState(
            drawn.pick(tokens, best),
            jnp.take_along_axis(score, best, axis=2),
            jnp.minimum(state.count + new, self.slots),
        )
        return jax.tree.map(lambda a, b: jnp.where(_like(new > 0, a), a, b), after, state)

    def decode(self, spec: Spec, state: H2OState, chunk: Chunk) -> tuple[Partial, H2OState]:
        after = self._put(spec, state, chunk)
        bias = self._bias(spec, after, chunk, self._held(after))
        q = spec.encoding.rotate(chunk.q, chunk.positions)
        logits = scores(q, after.sample.k, spec.scale, spec.softcap) + bias
        whole = blend(logits, after.sample.v)
        return whole, after._replace(score=after.score + _shares(logits, whole))

    def _put(self, spec: Spec, state: H2OState, chunk: Chunk) -> H2OState:
        """One token more, in the place of the one that leaves; nobody has looked at it yet."""
        new = self._new(state.sample, chunk.positions[:, 0])
        least = jnp.argmin(jnp.where(new, jnp.inf, state.score), axis=2).astype(jnp.int32)
        slot = jnp.where((state.count >= self.slots)[:, None], least, state.count[:, None])
        takes = jnp.broadcast_to(chunk.valid, slot.shape)
        token = _tokens(spec, chunk, state.sample)
        here = (jnp.arange(self.slots)[None, None] == slot[..., None]) & takes[..., None]
        return H2OState(
            drawn.put(state.sample, slot, takes, *(leaf[:, :, 0] for leaf in token)),
            jnp.where(here, np.float32(0), state.score),
            jnp.minimum(state.count + chunk.valid[:, 0].astype(jnp.int32), self.slots),
        )

    def kept(self, spec: Spec, state: H2OState) -> Kept:
        weight = jnp.where(self._held(state), np.float32(0), -jnp.inf)
        return Kept(state.sample.positions, weight)

    def _held(self, state: H2OState) -> Bool[Array, "B K S"]:
        held = jnp.arange(self.slots)[None, None] < state.count[:, None, None]
        return jnp.broadcast_to(held, state.score.shape)

    def _new(self, tokens: Sample, newest: Array) -> Bool[Array, "B K S"]:
        """The `window` newest, the last of them at `newest`."""
        return newest[:, None, None] - tokens.positions < np.uint32(self.window)

    def _bias(self, spec: Spec, state: H2OState, chunk: Chunk, seen: Array) -> Array:
        asked = chunk.valid[:, None, None, :, None]
        bias = jnp.where(asked & seen[:, :, None, None], np.float32(0), -jnp.inf)
        penalty = spec.encoding.bias(chunk.positions, state.sample.positions, seen.shape[1])
        return bias if penalty is None else bias + penalty

    def _local(self, spec: Spec, chunk: Chunk, whole: Partial) -> Float32[Array, "B K T"]:
        """What the queries of a chunk give to its own tokens."""
        kv_heads = chunk.k.shape[2]
        order = jnp.arange(chunk.valid.shape[1])
        seen = (order[:, None] >= order[None])[None] & chunk.valid[:, None] & chunk.valid[..., None]
        bias = jnp.where(seen, np.float32(0), -jnp.inf)[:, None, None]
        penalty = spec.encoding.bias(chunk.positions, chunk.positions, kv_heads)
        bias = bias if penalty is None else bias + penalty
        q, k = (spec.encoding.rotate(a, chunk.positions) for a in (chunk.q, chunk.k))
        logits = scores(q, k.transpose(0, 2, 1, 3), spec.scale, spec.softcap) + bias
        return _shares(logits, whole)


def _tokens(spec: Spec, chunk: Chunk, like: Sample) -> Sample:
    """A chunk as slots."""
    keys = spec.encoding.rotate(chunk.k, chunk.positions).transpose(0, 2, 1, 3)
    values = chunk.v.transpose(0, 2, 1, 3)
    positions = jnp.broadcast_to(chunk.positions[:, None], keys.shape[:3])
    return Sample(keys.astype(like.k.dtype), values.astype(like.v.dtype), positions)


def _shares(logits: Float32[Array, "B K G T S"], whole: Partial) -> Float32[Array, "B K S"]:
    """The weights that slots got in a softmax over these and others."""
    rows, kv_heads, group, queries, _ = logits.shape
    lse = whole.lse.reshape(rows, queries, kv_heads, group).transpose(0, 2, 3, 1)
    lse = jnp.where(lse == -jnp.inf, 0, lse)[..., None]
    return jnp.sum(jnp.exp(logits - lse), axis=(2, 3))


def _like(rows: Bool[Array, " B"], leaf: Array) -> Array:
    return rows.reshape(-1, *[1] * (leaf.ndim - 1))
