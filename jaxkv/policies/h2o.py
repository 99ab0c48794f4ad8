"""H2O (Zhang et al. 2023): the newest tokens, and the heavy hitters among those before them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import rows
from jaxkv.attention import chunked_scan, masked_bias, slot_attention
from jaxkv.cache import per_head
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Cached, Chunk, Leaf, Partial, Policy, Spec
from jaxkv.errors import UserError
from jaxkv.rows import Storage
from jaxkv.typing import Array, Bool, Float32, Int32


class H2OState(NamedTuple):
    """tokens: the cached tokens, in no order. score: the attention that each has received, summed
    over the query heads of its KV head. count: filled slots."""

    tokens: PerHeadTokens
    score: Float32[Array, "B K S"]
    count: Int32[Array, " B"]


@dataclass(frozen=True)
class H2O(Policy):
    """Cache the newest `window` tokens and the `heavy` earlier tokens with the most attention.

    Attention weights are very unequal, and a token that received much attention so far tends to
    receive more (section 4). So a cache of the heavy hitters loses little of the softmax.

    The score of a token is the sum of the softmax weights that all queries so far gave it, without
    the model's sink logits. A new token evicts the token with the lowest score that is not among
    the newest. The published code attends before it evicts, so its queries see one more token.
    Every query changes what the next one evicts, so a chunk is processed token by token, which
    makes prefill slow. Positions are absolute. By default the cache has 256 slots, like other
    policies here; the paper sizes each half as a tenth of the prompt. storage: as in streaming.
    """

    heavy: int = 128
    window: int = 128
    storage: Storage = "float"

    summary: ClassVar[str] = "the newest tokens, and those before them that got most attention"
    source: ClassVar[str] = "H2O, arXiv 2306.14048"

    def __post_init__(self) -> None:
        if self.heavy < 1 or self.window < 1:
            raise UserError(
                f"heavy and window must be at least 1, got {self.heavy} and {self.window}; try "
                "heavy=128,window=128"
            )
        rows.check(self.storage)

    @property
    def leaves(self) -> H2OState:
        return H2OState(per_head.leaves(self.storage), Leaf("B K S"), Leaf("B", shared=True))

    @property
    def slots(self) -> int:
        return self.heavy + self.window

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> H2OState:
        return H2OState(
            per_head.init(spec, batch, self.slots, self.storage),
            jnp.zeros((batch, spec.kv_heads, self.slots), jnp.float32),
            jnp.zeros((batch,), jnp.int32),
        )

    def update(self, spec: Spec, state: H2OState, chunk: Chunk) -> tuple[Partial, H2OState]:
        return chunked_scan(partial(self._update_one, spec), state, chunk, 1)

    def cached(self, spec: Spec, state: H2OState) -> Cached:
        weight = jnp.where(self._filled(state), np.float32(0), -jnp.inf)
        return Cached(state.tokens.positions, weight)

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        return per_head.nbytes(spec, self.slots, self.storage) + 4 * spec.kv_heads * self.slots + 4

    def _update_one(self, spec: Spec, state: H2OState, chunk: Chunk) -> tuple[Partial, H2OState]:
        """One token: it takes its slot first, then attends to every filled slot."""
        after = self._insert(spec, state, chunk)
        q = spec.encoding.rotate(chunk.q, chunk.positions)
        seen = self._filled(after)[:, :, None] & chunk.valid[:, None, :, None]
        places = chunk.positions, after.tokens.positions
        bias = masked_bias(spec, seen, *places, seen.shape[1])
        keys_and_values = after.tokens[:2]
        part, weights = slot_attention(
            q, *keys_and_values, bias, spec.scale, spec.softcap, return_weights=True
        )
        return part, after._replace(score=after.score + jnp.sum(weights, axis=(2, 3)))

    def _insert(self, spec: Spec, state: H2OState, chunk: Chunk) -> H2OState:
        """The state with one more token, of score 0, in place of the evicted one."""
        new = self._newest(state.tokens, chunk.positions[:, 0])
        lowest = jnp.argmin(jnp.where(new, jnp.inf, state.score), axis=2).astype(jnp.int32)
        slot = jnp.where((state.count >= self.slots)[:, None], lowest, state.count[:, None])
        takes = jnp.broadcast_to(chunk.valid, slot.shape)
        token = _tokens(spec, chunk, state.tokens)
        written = (jnp.arange(self.slots)[None, None] == slot[..., None]) & takes[..., None]
        return H2OState(
            per_head.put(state.tokens, slot, takes, token),
            jnp.where(written, np.float32(0), state.score),
            jnp.minimum(state.count + chunk.valid[:, 0].astype(jnp.int32), self.slots),
        )

    def _filled(self, state: H2OState) -> Bool[Array, "B K S"]:
        filled = jnp.arange(self.slots)[None, None] < state.count[:, None, None]
        return jnp.broadcast_to(filled, state.score.shape)

    def _newest(self, tokens: PerHeadTokens, newest: Array) -> Bool[Array, "B K S"]:
        """The `window` newest tokens, the last of them at position `newest`."""
        return newest[:, None, None] - tokens.positions < np.uint32(self.window)


def _tokens(spec: Spec, chunk: Chunk, like: PerHeadTokens) -> PerHeadTokens:
    """A chunk as tokens of each KV head."""
    keys = spec.encoding.rotate(chunk.k, chunk.positions).transpose(0, 2, 1, 3)
    values = chunk.v.transpose(0, 2, 1, 3)
    positions = jnp.broadcast_to(chunk.positions[:, None], keys.shape[:3])
    return PerHeadTokens(rows.store(keys, like.k), rows.store(values, like.v), positions)
