"""Sinks, a window, and a merge-and-reduce tree: what `balance-stream` and `stratified` share.

All KV heads share one count of sampled tokens, so that a query is rotated for all heads at once. A
group of level 0 counts from its first token on, but each head caches another token of the group.
Until that token comes, the head's cache-relative positions have a hole, one position wide, between
the sample and the window. Positions without holes give the same loss (tree_slots in evals/results).
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import xla_cpu
from jaxkv.attention import merge, slot_attention
from jaxkv.cache import per_head, ring
from jaxkv.cache.chunked_scan import chunked_scan
from jaxkv.cache.per_head import Evicted, Sample
from jaxkv.cache.ring import Ring
from jaxkv.cache.rows import Cache, Rows
from jaxkv.contract import Cached, Chunk, Leaf, Pages, Partial, Spec
from jaxkv.policies.discrepancy import Halving, halve
from jaxkv.policies.merge_reduce import occupancy
from jaxkv.policies.merge_reduce.occupancy import TreeSize
from jaxkv.policies.merge_reduce.tree import FOLD_AT, Reducer, absorb, fill_level_0
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32


class TreeState(NamedTuple):
    """recent: sinks and ring. sample: the levels of the tree. num_evicted: tokens that left the
    ring, folded after 2^31 of them (FOLD_AT in tree.py). rng: seeds of the draws."""

    recent: Ring
    sample: Sample
    num_evicted: UInt32[Array, " B"]
    rng: UInt32[Array, "B K 2"]


class TreeSettings(NamedTuple):
    """The settings of such a policy; exponent: of weights, 0 if a token counts once."""

    sinks: int
    window: int
    size: TreeSize
    halving: Halving
    exponent: float
    cache_relative: bool
    cache: Cache


def leaves(settings: TreeSettings) -> TreeState:
    """Every level but the first is rewritten seldom, half a block at a time."""
    size, page = settings.size, None
    if size.levels > 1:
        page = Pages(size.block, size.half, partial(last_writes, settings))
    sample = jax.tree.map(lambda leaf: dataclasses.replace(leaf, page=page), per_head.LEAVES)
    return TreeState(
        ring.leaves(settings.cache, settings.sinks), per_head.leaves(settings.cache, sample),
        Leaf("B", shared=True), Leaf("B K 2"),
    )  # fmt: skip


def max_lookback(settings: TreeSettings) -> int | float:
    """The number of cached tokens where positions are cache-relative."""
    if settings.cache_relative:
        return settings.sinks + settings.size.slots + settings.window
    return math.inf


def nbytes(settings: TreeSettings, spec: Spec) -> int:
    """Bytes of one sequence."""
    sinks, cache = settings.sinks, settings.cache
    recent = ring.nbytes(spec, sinks + settings.window, cache, sinks)
    return recent + per_head.nbytes(spec, settings.size.slots, cache) + 8 * spec.kv_heads + 4


def init(settings: TreeSettings, spec: Spec, batch: int, rng: jax.Array) -> TreeState:
    sinks, cache = settings.sinks, settings.cache
    return TreeState(
        ring.init(spec, batch, sinks + settings.window, cache, sinks),
        per_head.init(spec, batch, settings.size.slots, cache),
        jnp.zeros((batch,), jnp.uint32),
        per_head.seeds(rng, spec, batch),
    )


def update(
    settings: TreeSettings, spec: Spec, state: TreeState, chunk: Chunk
) -> tuple[Partial, TreeState]:
    """At most a block of tokens at a time, during which the levels change once at most."""

    def update_piece(state: TreeState, piece: Chunk) -> tuple[Partial, TreeState]:
        if piece.valid.shape[1] == 1:
            return _update_one(settings, spec, state, piece)
        return _update_block(settings, spec, state, piece)

    return chunked_scan(update_piece, state, chunk, settings.size.block)


def _update_one(
    settings: TreeSettings, spec: Spec, state: TreeState, chunk: Chunk
) -> tuple[Partial, TreeState]:
    numbers = ring.token_numbers(state.recent, chunk.valid)
    evicted = per_head.evicted_by_token(state.recent, chunk, settings.sinks)
    after = _absorb(settings, spec, state, evicted)
    num_evicted = after.num_evicted[:, None]
    num_sampled = _num_sampled(settings, num_evicted)
    chunk = xla_cpu.order_after(chunk, after.sample.k, after.sample.v)
    seen, recent = ring.decode(
        spec, state.recent, chunk, settings.sinks, settings.cache_relative, num_sampled=num_sampled
    )
    halves = _attend_halves(settings, spec, after, chunk, chunk.valid, numbers, num_evicted)
    return merge(seen, *halves), after._replace(recent=recent)


def _update_block(
    settings: TreeSettings, spec: Spec, state: TreeState, chunk: Chunk
) -> tuple[Partial, TreeState]:
    """A chunk of a block at most.

    Its early queries see the levels before the first one fills, its later queries the levels after;
    both see the tokens that level 0 got by then.
    """
    numbers = ring.token_numbers(state.recent, chunk.valid)
    evicted = per_head.evicted_by_chunk(spec, state.recent, chunk, settings.sinks)
    gone = jnp.cumsum(evicted.valid.astype(jnp.int32), axis=1)
    num_evicted = state.num_evicted[:, None] + gone.astype(jnp.uint32)  # at each query
    until = occupancy.tokens_until_full(settings.size, state.num_evicted)[:, None]
    early = gone.astype(jnp.uint32) < until
    reducer = _reducer(settings, spec)
    entered = fill_level_0(reducer, state.sample, state.num_evicted, state.rng, evicted)
    after = _absorb(settings, spec, state, evicted)
    num_sampled = _num_sampled(settings, num_evicted)
    sinks, window, cache_relative = settings.sinks, settings.window, settings.cache_relative
    before = state._replace(sample=entered)
    attend = partial(_attend_halves, settings, spec)
    parts = [
        ring.attend(spec, state.recent, chunk, sinks, window, cache_relative, num_sampled),
        *attend(before, chunk, chunk.valid & early, numbers, num_evicted),
        *attend(after, chunk, chunk.valid & ~early, numbers, num_evicted),
    ]
    recent = ring.write(spec, state.recent, chunk, sinks, cache_relative)
    return merge(*parts), after._replace(recent=recent)


def cached(settings: TreeSettings, state: TreeState) -> Cached:
    recent = ring.cached(state.recent)
    weights = _bias(settings, state.num_evicted[:, None], state.rng)[:, :, 0]
    return Cached(
        jnp.concatenate([recent.positions, state.sample.positions], axis=2),
        jnp.concatenate([recent.log_weight, weights], axis=2),
    )


def last_writes(settings: TreeSettings, tokens: int) -> tuple[int, ...]:
    """After how many tokens of a sequence each level but the first was last written."""
    before = settings.sinks + settings.window
    num_evicted = tokens - before
    if num_evicted >= FOLD_AT:  # after folding it no longer determines the last write
        return (tokens,) * (settings.size.levels - 1)
    written = occupancy.last_writes(settings.size, max(0, num_evicted))
    return tuple(last + before if last else 0 for last in written)


def _num_sampled(settings: TreeSettings, num_evicted: UInt32[Array, "B T"]) -> Int32[Array, "B T"]:
    return jnp.sum(occupancy.filled_per_level(settings.size, num_evicted), axis=-1, dtype=jnp.int32)


def _bias(
    settings: TreeSettings, num_evicted: UInt32[Array, "B T"], rng: UInt32[Array, "B K 2"]
) -> Float32[Array, "B K T S"]:
    """Log weights at each query, -inf in empty slots."""
    weights = np.float32(0)
    if settings.exponent:
        weights = np.float32(settings.exponent) * occupancy.log_weights(settings.size, num_evicted)
        weights = weights[:, None]
    return jnp.where(occupancy.filled_slots(settings.size, num_evicted, rng), weights, -jnp.inf)


def _attend_halves(
    settings: TreeSettings,
    spec: Spec,
    state: TreeState,
    chunk: Chunk,
    active: Bool[Array, "B T"],
    numbers: Int32[Array, "B T"],
    num_evicted: UInt32[Array, "B T"],
) -> list[Partial]:
    """Attention of the active queries to each half of a level.

    With cache-relative positions, keys are rotated to their slot within the half, and a query is
    rotated once per half, to its distance from the half's first slot. Floats are stored so; keys in
    int8 are rotated for each call.
    """
    batch, queries, heads, head_dim = chunk.q.shape
    kv_heads, width = state.rng.shape[1], settings.size.half
    parts = settings.size.slots // width
    views = jnp.broadcast_to(chunk.positions[:, :, None], (batch, queries, parts))
    if settings.cache_relative:
        num_sampled = _num_sampled(settings, num_evicted)
        view = ring.cache_relative_positions(state.recent, numbers, num_sampled)
        first = settings.sinks + occupancy.tokens_before_half(settings.size, num_evicted)  # [B,T,P]
        views = view[:, :, None] - first.astype(jnp.uint32)
    q = jnp.broadcast_to(chunk.q[:, :, None], (batch, queries, parts, heads, head_dim))
    q = spec.encoding.rotate(q.reshape(batch, -1, heads, head_dim), views.reshape(batch, -1))
    group = heads // kv_heads
    q = q.reshape(batch, queries, parts, kv_heads, group, head_dim).transpose(0, 1, 3, 2, 4, 5)
    weights = _bias(settings, num_evicted, state.rng)
    bias = jnp.where(active[:, None, :, None], weights, -jnp.inf)
    bias = bias.reshape(batch, kv_heads, 1, queries, parts, width)
    if settings.cache_relative:  # distances from the first slot of the half
        slot = jnp.broadcast_to(jnp.arange(width, dtype=jnp.uint32)[None], (batch, width))
        penalties = [spec.encoding.bias(views[:, :, part], slot, kv_heads) for part in range(parts)]
    else:
        places = state.sample.positions.reshape(batch, kv_heads, parts, width)
        penalties = [
            spec.encoding.bias(chunk.positions, places[:, :, part], kv_heads)
            for part in range(parts)
        ]
    if penalties[0] is not None:
        bias = bias + jnp.stack(penalties, axis=4)
    bias = bias.transpose(0, 1, 4, 2, 3, 5)
    # Halves become heads: slicing one off would copy it.
    k, v = jax.tree.map(
        lambda leaf: leaf.reshape(batch, kv_heads * parts, width, -1),
        _rotated_to_slots(settings, spec, state.sample),
    )
    partial = slot_attention(
        q.reshape(batch, queries, parts * heads, head_dim), k, v,
        bias.reshape(batch, kv_heads * parts, *bias.shape[3:]),
        spec.scale, spec.softcap,
    )  # fmt: skip
    out = partial.out.reshape(batch, queries, kv_heads, parts, group, head_dim)
    lse = partial.lse.reshape(batch, queries, kv_heads, parts, group)
    return [
        Partial(out[:, :, :, part].reshape(chunk.q.shape),
                lse[:, :, :, part].reshape(batch, queries, heads))
        for part in range(parts)
    ]  # fmt: skip


def _rotated_to_slots(settings: TreeSettings, spec: Spec, sample: Sample) -> tuple[Rows, Rows]:
    """Keys, rotated to their slot within a half if positions are cache-relative, and values."""
    if settings.cache == "float" or not settings.cache_relative:
        return sample.k, sample.v
    slot = jax.lax.broadcasted_iota(jnp.uint32, sample.positions.shape, 2)
    slot = slot % np.uint32(settings.size.half)
    return per_head.rerotate(spec, sample.k, slot - sample.positions), sample.v


def _absorb(settings: TreeSettings, spec: Spec, state: TreeState, evicted: Evicted) -> TreeState:
    """The state whose tree has absorbed the evicted tokens."""
    reducer = _reducer(settings, spec)
    sample, num_evicted = absorb(reducer, state.sample, state.num_evicted, state.rng, evicted)
    return state._replace(sample=sample, num_evicted=num_evicted)


def _reducer(settings: TreeSettings, spec: Spec) -> Reducer:
    def chosen(keys: Array, values: Array, uniforms: Array) -> Array:
        return halve(settings.halving, spec.scale, keys, values, uniforms).chosen

    return Reducer(settings.size, chosen, settings.cache_relative, spec, settings.cache)
