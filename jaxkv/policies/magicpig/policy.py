"""MagicPIG (Chen et al. 2024): sample the keys of a prompt by hash collisions with the query."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import draws, rows
from jaxkv.attention import chunked_scan, local_attention, masked_bias, merge, slot_attention
from jaxkv.cache import ring
from jaxkv.cache.ring import Ring
from jaxkv.contract import Cached, Chunk, Partial, Policy, Spec, prefill_finished
from jaxkv.errors import UserError
from jaxkv.pallas_kernels import import_pallas
from jaxkv.pallas_kernels.bucket_counts import bucket_counts
from jaxkv.pallas_kernels.flash_attention import KeySet, flash_attention
from jaxkv.pallas_kernels.sampled_attention import LogitSettings, sampled_attention
from jaxkv.platform import cpu as xla_cpu
from jaxkv.platform import gpu as xla_gpu
from jaxkv.policies.magicpig import hash_tables, index, lsh
from jaxkv.policies.magicpig.hash_tables import SampledPlaces
from jaxkv.policies.magicpig.index import IndexSettings, IndexState
from jaxkv.policies.magicpig.lsh import Hashing
from jaxkv.state import memory
from jaxkv.typing import Array, Float, Float32, Int32, UInt32

_SCAN = 256  # queries that share one read of the newest tokens


@dataclass(frozen=True)
class MagicPIG(Policy):
    """Attend to a sample of the prompt's keys, drawn by hash collisions with the query.

    Attention is an expectation under the softmax. Keys drawn with known probabilities, each
    weighted by the inverse, estimate the two sums of the softmax without bias; their quotient is
    consistent (sections 3.2, 4.1). Attention to the largest logits alone is biased (section 3.1).
    Keys with a small angle to the query often have its code under a random hash. So hash tables
    draw a key with a known probability that rises with its cosine to the query, at a cost
    proportional to the number of keys found (sections 4.2, 4.3).

    A prompt is attended exactly. After it, a query attends exactly to the first `sinks` tokens and
    the newest `window`. Of the other keys it attends to those that share its code in at least
    two of `L` tables of `K` bits, each weighted by the inverse of the probability of that.
    Every token stays cached. Each query head samples for itself, from tables that it shares with
    its KV head. A question that follows the end of prefill attends to a sample too; for exact
    attention make it part of the prompt.

    center: subtract the mean key before hashing. In trained models keys point almost opposite to
    queries, so without this few collide (Figures 2c and 8a).

    budget: maximum number of sampled keys per query head. If more match, a systematic sample of
    `budget` keys is taken, each weighted by matches / budget.

    u_floor: added to the probability. 1e-4, as in the published code, bounds the weight of rare
    keys; 0, as in the paper, leaves both sums unbiased.

    hash_generated: generated tokens are sampled too once they leave the window. Otherwise they stay
    exact, as published.

    tail: generated tokens that are compared one by one before new tables are built; later up to
    8,192.

    host_offload: the tables and the indexed tokens are stored in host memory, and the keys found
    are fetched from there.

    start: slots before the prompt, doubled as they fill.

    With a distance penalty (ALiBi), found keys are read twice: for their weights and for attention.
    """

    K: int = 10
    L: int = 150
    sinks: int = 4
    window: int = 64
    center: bool = True
    budget: int = 4096
    u_floor: float = 0.0
    hash_generated: bool = True
    tail: int = 1024
    host_offload: bool = False
    start: int = 512

    summary: ClassVar[str] = "every token; after the prompt, a sample of its keys by hash tables"
    source: ClassVar[str] = "MagicPIG, arXiv 2410.16179"
    grows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        import_pallas()
        _ = self.settings
        ring.check(self.sinks, self.window, "absolute")
        max_budget = hash_tables.MAX_FOUND
        if not 1 <= self.budget <= max_budget:
            raise UserError(
                f"budget must be from 1 to {max_budget}, got {self.budget}; try budget=4096"
            )
        if max(self.sinks, self.window) > rows.MAX_SLOTS:
            raise UserError(
                f"sinks and window must be at most {rows.MAX_SLOTS}, got {self.sinks} and "
                f"{self.window}; try sinks=4,window=64"
            )
        for name, value, usual in (("start", self.start, 512), ("tail", self.tail, 1024)):
            if not 1 <= value <= rows.MAX_SLOTS:
                raise UserError(
                    f"{name} must be from 1 to {rows.MAX_SLOTS}, got {value}; try {name}={usual}"
                )

    @property
    def settings(self) -> IndexSettings:
        """The settings of the index."""
        hashing = Hashing(self.K, self.L, self.u_floor)
        return IndexSettings(
            hashing,
            self.sinks,
            self.window,
            self.center,
            self.hash_generated,
            self.tail,
            self.host_offload,
        )

    @property
    def leaves(self) -> IndexState:
        return index.leaves(self.host_offload)

    @property
    def min_prompt(self) -> int:
        return self.sinks + self.window + 1

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> IndexState:
        if self.host_offload:
            memory.check_host("host_offload=true")
        return index.init(spec, batch, rng, self.start)

    def update(self, spec: Spec, state: IndexState, chunk: Chunk) -> tuple[Partial, IndexState]:
        if not prefill_finished(state):
            attended, appended = ring.update(
                spec, state.dense, chunk, ring.dense_settings(state.dense)
            )
            return attended, state._replace(dense=appended)
        if chunk.valid.shape[1] == 1:
            return self._update_one(spec, state, chunk)
        return chunked_scan(partial(self._update_chunk, spec), state, chunk, _SCAN)

    def cached(self, spec: Spec, state: IndexState) -> Cached:
        return index.cached(state)

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        return index.nbytes(spec, self.start, tokens)

    def reserve(self, spec: Spec, state: IndexState, tokens: int) -> IndexState:
        return index.reserve(spec, state, tokens, self.settings)

    def finish_prefill(self, spec: Spec, state: IndexState) -> IndexState:
        return index.finish_prefill(state, self.settings)

    def _update_one(
        self, spec: Spec, state: IndexState, chunk: Chunk
    ) -> tuple[Partial, IndexState]:
        numbers = index.token_numbers(state, chunk.valid)
        q = spec.encoding.rotate(chunk.q, chunk.positions)
        if xla_gpu.reads_by_flash(spec, chunk.q, state.dense.k):
            after = index.append(spec, state, chunk, self.settings)
            sets = self._end_sets(after, chunk, q, numbers)
            ends = Partial(*flash_attention(sets, spec.scale, spec.softcap))
            sampled = self._attend_samples(spec, after, q, numbers, chunk.positions)
            seen = merge(ends, sampled)
            return ring.refuse_overfull(seen, after.dense), after
        seen = self.attend_after_prefill(spec, state, q, numbers, chunk.positions)
        after = index.append(spec, state, xla_cpu.order_after(chunk, seen.out), self.settings)
        attended = merge(seen, local_attention(spec, chunk))
        return ring.refuse_overfull(attended, after.dense), after

    def _update_chunk(
        self, spec: Spec, state: IndexState, chunk: Chunk
    ) -> tuple[Partial, IndexState]:
        """Append the chunk first; then each query sees the tokens before it."""
        numbers = index.token_numbers(state, chunk.valid)
        state = index.append(spec, state, chunk, self.settings)
        q = spec.encoding.rotate(chunk.q, chunk.positions)
        seen = self.attend_after_prefill(spec, state, q, numbers, chunk.positions)
        return ring.refuse_overfull(seen, state.dense), state

    def attend_after_prefill(
        self,
        spec: Spec,
        state: IndexState,
        q: Float[Array, "B T N H"],
        numbers: Int32[Array, "B T"],
        positions: UInt32[Array, "B T"],
    ) -> Partial:
        """Attention of rotated queries to a state whose prefill is finished.

        numbers: the queries' token numbers, -1 on padding. A query sees its key if it is cached.
        """
        ends = self._attend_ends(spec, state, q, numbers, positions)
        return merge(ends, self._attend_samples(spec, state, q, numbers, positions))

    def _attend_samples(
        self, spec: Spec, state: IndexState, q: Array, numbers: Array, positions: Array
    ) -> Partial:
        """The sampled attention of several tokens per sequence."""
        queries = q, numbers, positions
        if numbers.shape[1] == 1:
            sample = self.sample(spec, state, *(leaf[:, 0] for leaf in queries))
            return Partial(*(leaf[:, None] for leaf in sample))
        queries = tuple(jnp.moveaxis(leaf, 1, 0) for leaf in queries)
        sample = jax.lax.map(lambda query: self.sample(spec, state, *query), queries)
        return Partial(*(jnp.moveaxis(leaf, 0, 1) for leaf in sample))

    def _end_sets(self, state: IndexState, chunk: Chunk, q: Array, numbers: Array) -> list[KeySet]:
        """What one token, which is cached already, reads of the sinks and the window."""
        k, v, _, count, _ = state.dense
        size = k.shape[2]
        end = jnp.where(chunk.valid, jnp.minimum(count, size)[:, None], 0)
        if not self.hash_generated:
            return [KeySet(q, k, v, end)]
        width = min(size, self.window)
        begin = jnp.clip(end[:, 0] - width, 0, size - width)
        slots = begin[:, None] + jnp.arange(width)[None]
        is_sink = jnp.where(slots < self.sinks, -jnp.inf, np.float32(0))[:, None]
        window = (_slice(leaf, begin, width) for leaf in (k, v))
        newest = KeySet(q, *window, end - jnp.minimum(begin[:, None], end), is_sink)
        return [newest, KeySet(q, k, v, jnp.minimum(end, self.sinks))] if self.sinks else [newest]

    def _attend_ends(
        self, spec: Spec, state: IndexState, q: Array, numbers: Array, positions: Array
    ) -> Partial:
        """Attention to the sinks and the window of each query."""
        cache, tokens = state.dense, numbers.shape[1]
        size, query_slots = cache.positions.shape[1], index.slot_of(state, numbers)
        last = jnp.minimum(query_slots, cache.count[:, None] - 1)

        def part(k: Array, v: Array, keys: Array, slot: Array, first: Array) -> Partial:
            seen = (slot[:, None] >= first[:, :, None]) & (slot[:, None] <= last[:, :, None])
            bias = masked_bias(spec, seen, positions, keys, k.shape[1])
            return slot_attention(q, k, v, bias, spec.scale, spec.softcap)

        if not self.hash_generated:  # every token that is not indexed
            return part(*cache[:3], jnp.arange(size)[None], jnp.zeros_like(query_slots))
        oldest = jnp.min(jnp.where(query_slots < 0, np.int32(size), query_slots), axis=1)
        width = min(size, self.window + tokens - 1)
        begin = jnp.clip(oldest + 1 - self.window, 0, size - width)
        tail = (_slice(leaf, begin, width) for leaf in cache[:3])
        slot = begin[:, None] + jnp.arange(width)[None]
        parts = [part(*tail, slot, jnp.maximum(query_slots - self.window + 1, self.sinks))]
        if self.sinks:
            first = cache.k[:, :, : self.sinks], cache.v[:, :, : self.sinks]
            slot, keys = jnp.arange(self.sinks)[None], cache.positions[:, : self.sinks]
            parts.append(part(*first, keys, slot, jnp.zeros_like(query_slots)))
        return merge(*parts)

    def sample(
        self,
        spec: Spec,
        state: IndexState,
        q: Float[Array, "B N H"],
        numbers: Array,
        positions: Array,
    ) -> Partial:
        """The sampled attention of one token per sequence: out [B,N,H], lse [B,N]."""
        sampled = find(state, self.settings, self.budget, q, numbers, positions)
        count = jnp.where(numbers[:, None] < 0, 0, sampled.count)  # padding
        places = state.indexed.positions.shape[1]
        nth = jnp.arange(sampled.places.shape[2])[None, None]
        indexed = (nth < count[:, :, None]) & (sampled.places < places)
        indexed = jnp.sum(indexed, axis=2, dtype=jnp.int32)
        part = self._attend_found(
            spec, state, state.indexed, state.norms, q, positions, sampled.places, indexed
        )
        if self.hash_generated:  # places of the tail come after those of the tables

            def attend_tail() -> Partial:
                in_tail = jnp.minimum(nth + indexed[:, :, None], sampled.places.shape[2] - 1)
                slots = jnp.take_along_axis(sampled.places, in_tail, axis=2) - places + self.sinks
                arguments = state.dense, state.tail_norms, q, positions, slots, count - indexed
                return merge(part, self._attend_found(spec, state, *arguments))

            if xla_gpu.finds_at_once(state.tables.entries):
                part = attend_tail()
            else:
                part = jax.lax.cond(jnp.any(count > indexed), attend_tail, lambda: part)
        nan = jnp.repeat(index.has_nan(state), q.shape[1] // state.center.shape[1], axis=1)
        part = Partial(
            jnp.where(nan[:, :, None], np.float32(np.nan), part.out),
            jnp.where(nan, np.float32(np.nan), part.lse),
        )
        # Beyond the budget, each drawn key counts for others.
        drawn = jnp.maximum(sampled.count, 1).astype(jnp.float32)
        share = sampled.total.astype(jnp.float32) / drawn
        return part._replace(lse=part.lse + jnp.log(jnp.maximum(share, 1)))

    def _attend_found(
        self,
        spec: Spec,
        state: IndexState,
        cache: Ring,
        norms: Array,
        q: Array,
        positions: Array,
        slots: Array,
        count: Array,
    ) -> Partial:
        """Attention to the first `count` of these slots, each weighted by its probability."""
        angles, hashing = index.angles(state, norms, q), self.settings.hashing
        settings, weight = LogitSettings(spec.scale, spec.softcap, hashing), angles
        penalty = spec.encoding.bias(positions[:, None], cache.positions, cache.k.shape[1])
        if penalty is not None:
            settings = settings._replace(weight_fn=None)
            slots = jnp.clip(slots, 0, cache.positions.shape[1] - 1)
            weight = lsh.log_weights(cache.k, q, slots, angles, hashing)
            penalty = penalty.reshape(*q.shape[:2], -1)
            weight = weight + jnp.take_along_axis(penalty, slots, axis=2)
        return Partial(
            *sampled_attention(q, cache.k, cache.v, slots, count, weight, settings=settings)
        )


def find(
    state: IndexState,
    settings: IndexSettings,
    budget: int,
    q: Float[Array, "B N H"],
    numbers: Int32[Array, " B"],
    positions: UInt32[Array, " B"],
) -> SampledPlaces:
    """The places of the keys that one rotated query per head agrees with often enough.

    At most `budget` places; of more than that, a systematic sample. Places of `indexed` come first,
    then those of the tail. numbers, positions: those of the queries; a draw is a function of the
    position.
    """
    query_slots = index.slot_of(state, numbers)
    batch, heads, head_dim = q.shape
    kv_heads, tail = state.tail_codes.shape[1], 0
    if settings.hash_generated:
        tail = state.tail_codes.shape[3]
    places, hashing = state.indexed.positions.shape[1], settings.hashing
    group, max_places = heads // kv_heads, min(budget, places + tail)
    codes = lsh.codes(
        q.reshape(batch * kv_heads, group, head_dim),
        state.planes.reshape(batch * kv_heads, head_dim, -1),
        hashing,
    )
    codes = codes.transpose(0, 2, 1).reshape(batch * heads, -1)
    nth = jnp.arange(group, dtype=jnp.uint32)[None, None]
    nth = positions[:, None, None] * np.uint32(group) + nth
    uniforms = draws.uniforms(nth * draws.GOLDEN, state.rng)  # far from the planes' draws

    def find_for_head(head: Array, code: Array, draw: Array) -> SampledPlaces:
        kv_head = head // group
        in_tables = hash_tables.tally(state.tables, kv_head, code, places)
        if not settings.hash_generated:
            return hash_tables.select(in_tables, max_places, draw)
        last = query_slots[head // heads] - settings.window - settings.sinks
        in_tail = hash_tables.compare(state.tail_codes, kv_head, code, last)
        selected = hash_tables.select(jnp.concatenate([in_tables, in_tail]), max_places, draw)
        # Words are whole, so bits of no place may stand between tables and tail.
        tables_end = in_tables.shape[0] * hash_tables.WORD
        skip = jnp.where(selected.places >= tables_end, tables_end - places, 0)
        return selected._replace(places=selected.places - skip)

    if xla_gpu.finds_at_once(state.tables.entries):
        per_head = codes.reshape(batch, heads, -1), uniforms.reshape(batch, heads)
        return _find_at_once(state, settings, max_places, *per_head, query_slots)
    every = jnp.arange(batch * heads, dtype=jnp.int32), codes, uniforms.reshape(-1)
    sampled = jax.lax.map(lambda arguments: find_for_head(*arguments), every)
    return jax.tree.map(lambda a: a.reshape(batch, heads, *a.shape[1:]), sampled)


def _find_at_once(
    state: IndexState,
    settings: IndexSettings,
    max_places: int,
    codes: Int32[Array, "B N L"],
    draw: Float32[Array, "B N"],
    query_slots: Int32[Array, " B"],
) -> SampledPlaces:
    """`find` for all heads in a few kernels, without a loop."""
    counts = bucket_counts(*state.tables, codes, state.indexed.positions.shape[1])
    if settings.hash_generated:
        batch, kv_heads, tables, tail = state.tail_codes.shape
        grouped = codes.reshape(batch, kv_heads, -1, tables, 1).astype(state.tail_codes.dtype)
        equal = state.tail_codes[:, :, None] == grouped
        equal = jnp.sum(equal, axis=3, dtype=jnp.int32).reshape(batch, -1, tail)
        last = query_slots - settings.window - settings.sinks
        left_window = jnp.arange(tail)[None] <= last[:, None]
        equal = jnp.where(left_window[:, None], equal, 0)
        counts = jnp.concatenate([counts, equal], axis=2)
    return hash_tables.select_at_once(counts >= 2, max_places, draw)


def _slice(leaf: Array, begin: Int32[Array, " B"], width: int) -> Array:
    """[B,...,S,H] or [B,S], `width` slots of each sequence from its own beginning on."""
    axis = 0 if leaf.ndim == 2 else 1

    def slice_sequence(slots: Array, at: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(slots, at, width, axis)

    return xla_cpu.map_sequences(slice_sequence, leaf, begin)
