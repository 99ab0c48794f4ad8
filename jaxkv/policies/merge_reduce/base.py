"""Sinks, a window, and a merge-and-reduce tree: what `balance-stream` and `stratified` share.

All KV heads share one count of sampled tokens, so that a query is rotated for all heads at once. A
group of level 0 counts as cached from its first token on, although a head may draw a later one.
Until that token comes, the head's cache-relative positions have a hole, one position wide, between
the sample and the window. Positions without holes give the same loss (tree_slots in evals/results).
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import contract, draws, rows
from jaxkv.attention import chunked_scan, merge, slot_attention
from jaxkv.cache import per_head, ring
from jaxkv.cache.per_head import Evicted, PerHeadTokens
from jaxkv.cache.ring import Ring, RingSettings
from jaxkv.contract import Cached, Chunk, Leaf, Pages, Partial, Policy, Spec
from jaxkv.pallas_kernels.flash_attention import KeySet
from jaxkv.platform import cpu as xla_cpu
from jaxkv.platform import gpu as xla_gpu
from jaxkv.policies.discrepancy import Halving
from jaxkv.policies.merge_reduce import occupancy
from jaxkv.policies.merge_reduce.occupancy import TreeSize
from jaxkv.policies.merge_reduce.tree import HALVE_COUNT_AT, Reducer, absorb, fill_level_0
from jaxkv.rows import Rows, Storage
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32


class TreeState(NamedTuple):
    """recent: sinks and ring. sample: the levels of the tree. num_evicted: tokens that left the
    ring; the count is halved when it reaches HALVE_COUNT_AT. rng: seeds of the draws."""

    recent: Ring
    sample: PerHeadTokens
    num_evicted: UInt32[Array, " B"]
    rng: UInt32[Array, "B K 2"]


class TreePolicy(Policy):
    """Sinks, a window and a tree: a frozen dataclass with these fields, `size` and `halving`."""

    sinks: int
    window: int
    weighted: bool
    positions: Literal["relative", "absolute"]
    exponent: float
    storage: Storage

    def __post_init__(self) -> None:
        ring.check(self.sinks, self.window, self.positions)
        per_head.check_exponent(self.exponent, self.weighted)
        rows.check(self.storage)

    @property
    def size(self) -> TreeSize:
        """The levels of the tree and their slots."""
        raise contract.missing(self, "size")

    @property
    def halving(self) -> Halving:
        """How a full level is halved."""
        raise contract.missing(self, "halving")

    @property
    def leaves(self) -> TreeState:
        """Every level but the first is rewritten seldom, half a block at a time."""
        page = None
        if self.size.levels > 1:
            page = Pages(self.size.block, self.size.half, self.last_writes)
        sample = jax.tree.map(lambda leaf: dataclasses.replace(leaf, page=page), per_head.LEAVES)
        return TreeState(
            ring.leaves(self.storage, self.sinks),
            per_head.leaves(self.storage, sample),
            Leaf("B", shared=True),
            Leaf("B K 2"),
        )

    @property
    def cache_relative(self) -> bool:
        return self.positions == "relative"

    @property
    def _recent(self) -> RingSettings:
        return RingSettings(self.sinks, self.window, self.cache_relative)

    @property
    def max_lookback(self) -> int | float:
        """The number of cached tokens where positions are cache-relative."""
        return self.sinks + self.size.slots + self.window if self.cache_relative else math.inf

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        recent = ring.nbytes(spec, self.sinks + self.window, self.storage, self.sinks)
        sample = per_head.nbytes(spec, self.size.slots, self.storage)
        return recent + sample + 8 * spec.kv_heads + 4

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> TreeState:
        return TreeState(
            ring.init(spec, batch, self.sinks + self.window, self.storage, self.sinks),
            per_head.init(spec, batch, self.size.slots, self.storage),
            jnp.zeros((batch,), jnp.uint32),
            draws.seeds(rng, spec, batch),
        )

    def update(self, spec: Spec, state: TreeState, chunk: Chunk) -> tuple[Partial, TreeState]:
        """At most a block of tokens at a time, during which the levels change once at most."""
        return chunked_scan(partial(self._update, spec), state, chunk, self.size.block)

    def cached(self, spec: Spec, state: TreeState) -> Cached:
        recent = ring.cached(state.recent)
        weights = self._bias(state.num_evicted[:, None], state.rng)[:, :, 0]
        return Cached(
            jnp.concatenate([recent.positions, state.sample.positions], axis=2),
            jnp.concatenate([recent.log_weight, weights], axis=2),
        )

    def last_writes(self, tokens: int) -> tuple[int, ...]:
        """After how many tokens of a sequence each level but the first was last written."""
        before = self.sinks + self.window
        num_evicted = tokens - before
        if num_evicted >= HALVE_COUNT_AT:  # once halved, it no longer determines the last write
            return (tokens,) * (self.size.levels - 1)
        written = occupancy.last_writes(self.size, max(0, num_evicted))
        return tuple(last + before if last else 0 for last in written)

    def _update(self, spec: Spec, state: TreeState, chunk: Chunk) -> tuple[Partial, TreeState]:
        if chunk.valid.shape[1] == 1:
            return self._update_one(spec, state, chunk)
        return self._update_block(spec, state, chunk)

    def _update_one(self, spec: Spec, state: TreeState, chunk: Chunk) -> tuple[Partial, TreeState]:
        numbers = ring.token_numbers(state.recent, chunk.valid)
        evicted = per_head.evicted_by_token(state.recent, chunk, self.sinks)
        after = self._absorb(spec, state, evicted)
        num_evicted = after.num_evicted[:, None]
        num_sampled = self._num_sampled(num_evicted)
        chunk = xla_cpu.order_after(chunk, after.sample.k, after.sample.v)
        decode = partial(ring.decode, spec, state.recent, chunk, self._recent, num_sampled)
        halves = spec, after, chunk, chunk.valid, numbers, num_evicted
        if xla_gpu.reads_by_flash(spec, chunk.q, state.recent.k):
            attended, recent = decode(beside=self._key_sets_of_halves(*halves))
        else:
            seen, recent = decode()
            attended = merge(seen, *self._attend_halves(*halves))
        return attended, after._replace(recent=recent)

    def _update_block(
        self, spec: Spec, state: TreeState, chunk: Chunk
    ) -> tuple[Partial, TreeState]:
        """A chunk of a block at most.

        Its early queries see the levels before the first one fills, its later queries the levels
        after; both see the tokens that level 0 got by then.
        """
        numbers = ring.token_numbers(state.recent, chunk.valid)
        evicted = per_head.evicted_by_chunk(spec, state.recent, chunk, self.sinks)
        gone = jnp.cumsum(evicted.valid.astype(jnp.int32), axis=1)
        num_evicted = state.num_evicted[:, None] + gone.astype(jnp.uint32)  # at each query
        tokens_until_full = occupancy.tokens_until_full(self.size, state.num_evicted)[:, None]
        before_halving = gone.astype(jnp.uint32) < tokens_until_full
        reducer = self._reducer(spec)
        entered = fill_level_0(reducer, state.sample, state.num_evicted, state.rng, evicted)
        after = self._absorb(spec, state, evicted)
        num_sampled = self._num_sampled(num_evicted)
        unhalved = state._replace(sample=entered)
        attend_halves = partial(self._attend_halves, spec)
        parts = [
            ring.attend(spec, state.recent, chunk, self._recent, num_sampled),
            *attend_halves(unhalved, chunk, chunk.valid & before_halving, numbers, num_evicted),
            *attend_halves(after, chunk, chunk.valid & ~before_halving, numbers, num_evicted),
        ]
        recent = ring.write(spec, state.recent, chunk, self._recent)
        return merge(*parts), after._replace(recent=recent)

    def _num_sampled(self, num_evicted: UInt32[Array, "B T"]) -> Int32[Array, "B T"]:
        return jnp.sum(occupancy.filled_per_level(self.size, num_evicted), axis=-1, dtype=jnp.int32)

    def _bias(
        self, num_evicted: UInt32[Array, "B T"], rng: UInt32[Array, "B K 2"]
    ) -> Float32[Array, "B K T S"]:
        """Log weights at each query, -inf in empty slots."""
        weights = np.float32(0)
        if self.weighted and self.exponent:
            weights = np.float32(self.exponent) * occupancy.log_weights(self.size, num_evicted)
            weights = weights[:, None]
        return jnp.where(occupancy.filled_slots(self.size, num_evicted, rng), weights, -jnp.inf)

    def _attend_halves(
        self,
        spec: Spec,
        state: TreeState,
        chunk: Chunk,
        active: Bool[Array, "B T"],
        numbers: Int32[Array, "B T"],
        num_evicted: UInt32[Array, "B T"],
    ) -> list[Partial]:
        """Attention of the active queries to each half of a level.

        With cache-relative positions, keys are rotated to their slot within the half, and a query
        is rotated once per half, to its distance from the half's first slot. Floats are stored so;
        keys in int8 are rotated for each call.
        """
        batch, queries, heads, head_dim = chunk.q.shape
        kv_heads, width = state.rng.shape[1], self.size.half
        parts = self.size.slots // width
        q, query_positions = self._queries_of_halves(spec, state, chunk, numbers, num_evicted)
        group = heads // kv_heads
        q = q.reshape(batch, queries, parts, kv_heads, group, head_dim).transpose(0, 1, 3, 2, 4, 5)
        weights = self._bias(num_evicted, state.rng)
        bias = jnp.where(active[:, None, :, None], weights, -jnp.inf)
        bias = bias.reshape(batch, kv_heads, 1, queries, parts, width)
        if self.cache_relative:  # distances from the first slot of the half
            slot = jnp.broadcast_to(jnp.arange(width, dtype=jnp.uint32)[None], (batch, width))
            pairs = [(query_positions[:, :, part], slot) for part in range(parts)]
        else:
            places = state.sample.positions.reshape(batch, kv_heads, parts, width)
            pairs = [(chunk.positions, places[:, :, part]) for part in range(parts)]
        penalties = [spec.encoding.bias(*pair, kv_heads) for pair in pairs]
        if penalties[0] is not None:
            bias = bias + jnp.stack(penalties, axis=4)
        bias = bias.transpose(0, 1, 4, 2, 3, 5)
        # Halves become heads: slicing one off would copy it.
        k, v = jax.tree.map(
            lambda leaf: leaf.reshape(batch, kv_heads * parts, width, -1),
            self._rotated_to_slots(spec, state.sample),
        )
        q = q.reshape(batch, queries, parts * heads, head_dim)
        bias = bias.reshape(batch, kv_heads * parts, *bias.shape[3:])
        partial = slot_attention(q, k, v, bias, spec.scale, spec.softcap)
        out = partial.out.reshape(batch, queries, kv_heads, parts, group, head_dim)
        lse = partial.lse.reshape(batch, queries, kv_heads, parts, group)
        return [
            Partial(
                out[:, :, :, part].reshape(chunk.q.shape),
                lse[:, :, :, part].reshape(batch, queries, heads),
            )
            for part in range(parts)
        ]

    def _queries_of_halves(
        self,
        spec: Spec,
        state: TreeState,
        chunk: Chunk,
        numbers: Int32[Array, "B T"],
        num_evicted: UInt32[Array, "B T"],
    ) -> tuple[Float[Array, "B X N H"], UInt32[Array, "B T P"]]:
        """The queries rotated for each of P halves, X = T P of them, and their positions there."""
        batch, queries, heads, head_dim = chunk.q.shape
        parts = self.size.slots // self.size.half
        query_positions = jnp.broadcast_to(chunk.positions[:, :, None], (batch, queries, parts))
        if self.cache_relative:
            num_sampled = self._num_sampled(num_evicted)
            cache_positions = ring.cache_relative_positions(state.recent, numbers, num_sampled)
            first = self.sinks + occupancy.tokens_before_half(self.size, num_evicted)  # [B,T,P]
            query_positions = cache_positions[:, :, None] - first.astype(jnp.uint32)
        q = jnp.broadcast_to(chunk.q[:, :, None], (batch, queries, parts, heads, head_dim))
        q = q.reshape(batch, -1, heads, head_dim)
        return spec.encoding.rotate(q, query_positions.reshape(batch, -1)), query_positions

    def _key_sets_of_halves(
        self,
        spec: Spec,
        state: TreeState,
        chunk: Chunk,
        active: Bool[Array, "B 1"],
        numbers: Int32[Array, "B 1"],
        num_evicted: UInt32[Array, "B 1"],
    ) -> list[KeySet]:
        """What `_attend_halves` reads of one token, for `flash_attention`: a set per half."""
        q, _ = self._queries_of_halves(spec, state, chunk, numbers, num_evicted)
        weights, width = self._bias(num_evicted, state.rng)[:, :, 0], self.size.half
        k, v = self._rotated_to_slots(spec, state.sample)
        sets = []
        for part in range(self.size.slots // width):
            end = jnp.where(active, (part + 1) * width, 0).astype(jnp.int32)
            sets.append(KeySet(q[:, part : part + 1], k, v, end, weights, first=part * width))
        return sets

    def _rotated_to_slots(self, spec: Spec, sample: PerHeadTokens) -> tuple[Rows, Rows]:
        """Keys, rotated to their slot within a half with cache-relative positions, and values."""
        if self.storage == "float" or not self.cache_relative:
            return sample.k, sample.v
        slot = jax.lax.broadcasted_iota(jnp.uint32, sample.positions.shape, 2)
        slot = slot % np.uint32(self.size.half)
        return per_head.rerotate(spec, sample.k, slot - sample.positions), sample.v

    def _absorb(self, spec: Spec, state: TreeState, evicted: Evicted) -> TreeState:
        """The state whose tree has absorbed the evicted tokens."""
        reducer = self._reducer(spec)
        sample, num_evicted = absorb(reducer, state.sample, state.num_evicted, state.rng, evicted)
        return state._replace(sample=sample, num_evicted=num_evicted)

    def _reducer(self, spec: Spec) -> Reducer:
        return Reducer(self.size, self.halving, self.cache_relative, spec, self.storage)
