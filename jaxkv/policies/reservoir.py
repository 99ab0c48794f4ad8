"""Reservoir sampling (Pan et al.): sinks, a window, and a random sample of the evicted tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import draws, rows
from jaxkv.attention import chunked_scan, merge
from jaxkv.cache import per_head, ring
from jaxkv.cache.per_head import Evicted, PerHeadTokens
from jaxkv.cache.ring import Ring, RingSettings
from jaxkv.contract import Cached, Chunk, Leaf, Partial, Policy, Spec
from jaxkv.errors import UserError, check_choice
from jaxkv.platform import cpu as xla_cpu
from jaxkv.platform import gpu as xla_gpu
from jaxkv.rows import Storage
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32

_MAX_COUNT = np.int32(2**31 - 1)
_SCAN = 128  # tokens of a chunk whose masks over ring, sample and chunk are in memory at a time
_SCAN_CACHE_RELATIVE = 16  # the same where each query has a rotated sample of its own


class ReservoirState(NamedTuple):
    """recent: sinks and ring. num_evicted: tokens that left the ring. rng: seeds of the draws."""

    recent: Ring
    sample: PerHeadTokens
    num_evicted: Int32[Array, " B"]
    rng: UInt32[Array, "B K 2"]


@dataclass(frozen=True)
class Reservoir(Policy):
    """Cache the first `sinks` tokens, the newest `window`, and `sample` of the tokens between.

    A window evicts all older tokens. A reservoir is a uniform random sample of the evicted tokens
    in constant memory, so distant text stays represented (section 4).

    scheme: with `uniform`, every evicted token is in the sample with the same probability, the
    sample size over the number of evicted tokens (equations 1 and 2). `geometric` is the code of
    section 3, Figure 2: each evicted token enters with probability sample / (sample + 1), so
    sampled tokens left the window about `sample` tokens ago. weighted: a sampled token counts for
    all evicted tokens that it represents (Horvitz-Thompson); this needs `uniform`. positions: as in
    streaming. exponent: a weighted token that represents n tokens counts for n^exponent. With an
    exponent below 1 the estimate is biased and has a lower variance. storage: as in streaming.
    """

    sinks: int = 4
    window: int = 126
    sample: int = 126
    scheme: Literal["uniform", "geometric"] = "uniform"
    weighted: bool = False
    positions: Literal["relative", "absolute"] = "relative"
    exponent: float = 1.0
    storage: Storage = "float"

    summary: ClassVar[str] = "sinks, a window, and a random sample of the evicted tokens"
    source: ClassVar[str] = "Pan et al., reservoir sampling for StreamingLLM"

    def __post_init__(self) -> None:
        ring.check(self.sinks, self.window, self.positions)
        if self.sample < 1:
            raise UserError(f"sample must be at least 1, got {self.sample}; try sample=126")
        check_choice("scheme", self.scheme, ("uniform", "geometric"))
        if self.weighted and self.scheme == "geometric":
            raise UserError("weighted=true belongs to scheme=uniform, got geometric; leave one out")
        per_head.check_exponent(self.exponent, self.weighted)
        rows.check(self.storage)

    @property
    def leaves(self) -> ReservoirState:
        recent = ring.leaves(self.storage, self.sinks)
        return ReservoirState(
            recent, per_head.leaves(self.storage), Leaf("B", shared=True), Leaf("B K 2")
        )

    @property
    def cache_relative(self) -> bool:
        return self.positions == "relative"

    @property
    def _recent(self) -> RingSettings:
        return RingSettings(self.sinks, self.window, self.cache_relative)

    @property
    def max_lookback(self) -> int | float:
        return self.sinks + self.sample + self.window if self.cache_relative else math.inf

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> ReservoirState:
        return ReservoirState(
            ring.init(spec, batch, self.sinks + self.window, self.storage, self.sinks),
            per_head.init(spec, batch, self.sample, self.storage),
            jnp.zeros((batch,), jnp.int32),
            draws.seeds(rng, spec, batch),
        )

    def update(
        self, spec: Spec, state: ReservoirState, chunk: Chunk
    ) -> tuple[Partial, ReservoirState]:
        size = _SCAN_CACHE_RELATIVE if self.cache_relative else _SCAN
        return chunked_scan(partial(self._update, spec), state, chunk, size)

    def cached(self, spec: Spec, state: ReservoirState) -> Cached:
        recent, sample = ring.cached(state.recent), state.sample
        filled = self._filled(state.num_evicted[:, None])[:, 0]
        weight = jnp.where(filled, self._log_weight(state.num_evicted)[:, None, None], -jnp.inf)
        weight = jnp.broadcast_to(weight, sample.positions.shape)
        return Cached(
            jnp.concatenate([recent.positions, sample.positions], axis=2),
            jnp.concatenate([recent.log_weight, weight], axis=2),
        )

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        recent = ring.nbytes(spec, self.sinks + self.window, self.storage, self.sinks)
        sample = per_head.nbytes(spec, self.sample, self.storage)
        return recent + sample + 8 * spec.kv_heads + 4

    def _update(
        self, spec: Spec, state: ReservoirState, chunk: Chunk
    ) -> tuple[Partial, ReservoirState]:
        if chunk.valid.shape[1] == 1:
            return self._update_one(spec, state, chunk)
        evicted = per_head.evicted_by_chunk(spec, state.recent, chunk, self.sinks)
        stored, num_evicted = self._select(state, evicted)  # [B,K,T,R], [B,T]
        num_sampled = jnp.minimum(num_evicted, self.sample)
        recent = ring.attend(spec, state.recent, chunk, self._recent, num_sampled)
        weight = jnp.where(chunk.valid, self._log_weight(num_evicted), -jnp.inf)
        tokens = per_head.join(state.sample, evicted.tokens)
        if self.cache_relative:
            numbers = ring.token_numbers(state.recent, chunk.valid)
            query_positions = ring.cache_relative_positions(state.recent, numbers, num_sampled)
            sample = self._attend_cache_relative(
                spec, chunk.q, query_positions, tokens, stored, num_evicted, weight
            )
        else:
            seen = jnp.where(self._filled(num_evicted), weight[:, None, :, None], -jnp.inf)
            batch, heads, times = np.ix_(*map(np.arange, stored.shape[:3]))
            bias = jnp.full((*stored.shape[:3], tokens.positions.shape[2]), -jnp.inf)
            bias = bias.at[batch[..., None], heads[..., None], times[..., None], stored].max(seen)
            sample = per_head.attend(spec, chunk.q, chunk.positions, tokens, bias)
        after = state._replace(
            recent=ring.write(spec, state.recent, chunk, self._recent),
            sample=per_head.pick(tokens, stored[:, :, -1]),
            num_evicted=num_evicted[:, -1],
        )
        return merge(recent, sample), after

    def _attend_cache_relative(
        self,
        spec: Spec,
        q: Array,
        query_positions: UInt32[Array, "B T"],
        tokens: PerHeadTokens,
        stored: Int32[Array, "B K T S"],
        num_evicted: Int32[Array, "B T"],
        weight: Float32[Array, "B T"],
    ) -> Partial:
        """Each query over the sample as it was at that token, at the positions within the cache.

        Replacing one token shifts the cache-relative positions of others, so each query has a
        rotated sample of its own. Queries become sequences of the batch.
        """
        batch, kv_heads, queries, size = stored.shape
        samples = per_head.pick(tokens, stored.reshape(batch, kv_heads, -1))

        def split(leaf: Array) -> Array:
            leaf = jnp.moveaxis(leaf.reshape(*stored.shape, *leaf.shape[3:]), 2, 1)
            return leaf.reshape(batch * queries, *leaf.shape[2:])

        per_query = lambda leaf: leaf.reshape(batch * queries, 1, *leaf.shape[2:])
        sample = self._at_cache_positions(
            spec, jax.tree.map(split, samples), per_query(num_evicted)
        )
        bias = jnp.where(
            self._filled(per_query(num_evicted)), per_query(weight)[:, :, None, None], -jnp.inf
        )
        bias = jnp.broadcast_to(bias, (batch * queries, kv_heads, 1, size))
        partial = per_head.attend(spec, per_query(q), per_query(query_positions), sample, bias)
        return Partial(*(leaf.reshape(batch, queries, *leaf.shape[2:]) for leaf in partial))

    def _update_one(
        self, spec: Spec, state: ReservoirState, chunk: Chunk
    ) -> tuple[Partial, ReservoirState]:
        after = self._evict_one(state, chunk)
        chunk = xla_cpu.order_after(chunk, after.sample.k, after.sample.v)
        num_sampled = jnp.minimum(after.num_evicted, self.sample)[:, None]
        num_evicted, query_positions, sample = (
            after.num_evicted[:, None],
            chunk.positions,
            after.sample,
        )
        weight = jnp.where(chunk.valid, self._log_weight(num_evicted), -jnp.inf)
        bias = jnp.where(self._filled(num_evicted), weight[:, None, :, None], -jnp.inf)
        bias = jnp.broadcast_to(bias, (*state.rng.shape[:2], 1, self.sample))
        if self.cache_relative:
            numbers = ring.token_numbers(state.recent, chunk.valid)
            query_positions = ring.cache_relative_positions(state.recent, numbers, num_sampled)
            sample = self._at_cache_positions(spec, sample, num_evicted)
        keys = spec, chunk.q, query_positions, sample, bias
        decode = partial(ring.decode, spec, state.recent, chunk, self._recent, num_sampled)
        if xla_gpu.reads_by_flash(spec, chunk.q, state.recent.k):
            attended, recent = decode(beside=[per_head.key_set(*keys)])
        else:
            seen, recent = decode()
            attended = merge(seen, per_head.attend(*keys))
        return attended, after._replace(recent=recent)

    def _evict_one(self, state: ReservoirState, chunk: Chunk) -> ReservoirState:
        """The state after one new token has evicted the oldest of the ring."""
        sample = state.sample
        token, _, valid = per_head.evicted_by_token(state.recent, chunk, self.sinks)
        evicts = valid[:, 0]
        draw = draws.bits(token.positions, state.rng)[:, :, 0]
        stored = draws.bits(sample.positions, state.rng)
        at, takes = self._place(stored, state.num_evicted, draw)
        takes &= evicts[:, None]
        sample = per_head.put(sample, at, takes, token)
        return state._replace(sample=sample, num_evicted=_add(state.num_evicted, evicts))

    def _place(
        self,
        stored: UInt32[Array, "B K S"],
        num_evicted: Int32[Array, " B"],
        draw: UInt32[Array, "B K"],
    ) -> tuple[Int32[Array, "B K"], Bool[Array, "B K"]]:
        """The slot of an evicted token, and whether it enters the sample.

        stored: the draws of the sampled tokens. num_evicted: tokens evicted before.
        """
        if self.scheme == "uniform":  # the sample is the tokens with the smallest draws
            at = jnp.argmax(stored, axis=2).astype(jnp.int32)
            takes = draw < jnp.max(stored, axis=2)
        else:
            at = (draw % np.uint32(self.sample + 1)).astype(jnp.int32)
            takes = at < self.sample
        filling = (num_evicted < self.sample)[:, None]
        return jnp.where(filling, num_evicted[:, None], at), filling | takes

    def _select(
        self, state: ReservoirState, evicted: Evicted
    ) -> tuple[Int32[Array, "B K T S"], Int32[Array, "B T"]]:
        """The content of each sample slot after each token, and the number evicted by then.

        A value below `sample` is that slot of the old sample; others are places in evicted.tokens.
        """
        bits = draws.bits(evicted.tokens.positions, state.rng)
        place = jnp.arange(self.sample)[None, None]

        def place_token(carry: tuple, new: tuple) -> tuple[tuple, tuple]:
            source, stored, num_evicted = carry
            index, valid = new
            draw = jnp.take_along_axis(bits, index[:, None, None], axis=2)[:, :, 0]
            slot, takes = self._place(stored, num_evicted, draw)
            written = (place == slot[:, :, None]) & (takes & valid[:, None])[:, :, None]
            source = jnp.where(written, self.sample + index[:, None, None], source)
            stored = jnp.where(written, draw[:, :, None], stored)
            carry = source, stored, _add(num_evicted, valid)
            return carry, (source, carry[2])

        source = jnp.broadcast_to(place, state.sample.positions.shape).astype(jnp.int32)
        begin = source, draws.bits(state.sample.positions, state.rng), state.num_evicted
        _, (sources, num_evicted) = jax.lax.scan(
            place_token, begin, (evicted.index.T, evicted.valid.T)
        )
        return jnp.moveaxis(sources, 0, 2), num_evicted.T

    def _at_cache_positions(
        self, spec: Spec, sample: PerHeadTokens, num_evicted: Int32[Array, "B 1"]
    ) -> PerHeadTokens:
        """A sample rotated from the text positions of its tokens to positions in the cache."""
        ranks = self.sinks + per_head.ranks(sample, self._filled(num_evicted)[:, 0])
        ranks = ranks.astype(jnp.uint32)
        return PerHeadTokens(
            per_head.rerotate(spec, sample.k, ranks - sample.positions), sample.v, ranks
        )

    def _filled(self, num_evicted: Int32[Array, "B T"]) -> Bool[Array, "B 1 T S"]:
        """The sample slots that are filled once `num_evicted` tokens have left the window."""
        return jnp.arange(self.sample)[None, None, None] < num_evicted[:, None, :, None]

    def _log_weight(self, num_evicted: Int32[Array, "..."]) -> Float32[Array, "..."]:
        if not self.weighted:
            return jnp.zeros(num_evicted.shape, jnp.float32)
        represented = jnp.maximum(num_evicted.astype(jnp.float32) / np.float32(self.sample), 1)
        return np.float32(self.exponent) * jnp.log(represented)


def _add(count: Int32[Array, "..."], new: Array) -> Int32[Array, "..."]:
    """A sum that saturates at the largest int32."""
    new = new.astype(jnp.int32)
    return jnp.minimum(count, _MAX_COUNT - new) + new
