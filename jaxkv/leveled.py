"""Sinks, a window, and what left it in levels: the policies `balance-stream` and `stratified`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import sample as drawn
from jaxkv import slots
from jaxkv.attention import merge, slot_attention
from jaxkv.contract import Chunk, Kept, Partial, Settling, Spec
from jaxkv.halving import Halving, halve
from jaxkv.merge_reduce import LAST, Reducer, absorb, enter
from jaxkv.occupancy import Shape, before_half, fills, held, log_weights, tokens_until_full
from jaxkv.occupancy import settled as settled_levels
from jaxkv.pieces import in_pieces
from jaxkv.sample import Sample
from jaxkv.slots import Slots
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32


class LeveledState(NamedTuple):
    """recent: sinks and ring. middle: how many tokens have left the ring, folded after 2^31 of them
    (LAST in merge_reduce.py). key: of the draws."""

    recent: Slots
    sample: Sample
    middle: UInt32[Array, " B"]
    key: UInt32[Array, "B K 2"]


SAMPLE = ("sample.k", "sample.v", "sample.positions")
AXES = LeveledState(slots.AXES, drawn.AXES, ("B",), ("B", "K", "2"))


class Leveled(NamedTuple):
    """The settings of such a policy."""

    sinks: int
    window: int
    shape: Shape
    how: Halving
    weighted: bool
    by_rank: bool


def init(of: Leveled, spec: Spec, rows: int, key: jax.Array) -> LeveledState:
    return LeveledState(
        slots.init(spec, rows, of.sinks + of.window),
        drawn.init(spec, rows, of.shape.slots),
        jnp.zeros((rows,), jnp.uint32),
        drawn.keys(key, spec, rows),
    )


def attend(of: Leveled, spec: Spec, state: LeveledState, chunk: Chunk) -> Partial:
    return take(of, spec, state, chunk)[0]


def take(
    of: Leveled, spec: Spec, state: LeveledState, chunk: Chunk
) -> tuple[Partial, LeveledState]:
    """Token by token: at most a block of tokens at a time, in which levels change once at most."""

    def one(state: LeveledState, piece: Chunk) -> tuple[Partial, LeveledState]:
        some = _take if piece.valid.shape[1] > 1 else decode
        return some(of, spec, state, piece)

    return in_pieces(one, state, chunk, of.shape.block)


def extend(of: Leveled, spec: Spec, state: LeveledState, chunk: Chunk) -> LeveledState:
    if chunk.valid.shape[1] > 1:
        leaving = drawn.leaving(spec, state.recent, chunk, of.sinks)
        by = _reducer(of, spec)
        state = _after(state, *absorb(by, state.sample, state.middle, state.key, leaving))
    else:
        state = _leave_one(of, spec, state, chunk)
    recent = slots.extend(spec, state.recent, chunk, of.sinks, of.by_rank)
    return state._replace(recent=recent)


def decode(
    of: Leveled, spec: Spec, state: LeveledState, chunk: Chunk
) -> tuple[Partial, LeveledState]:
    numbers = slots.number(state.recent, chunk.valid)
    after = _leave_one(of, spec, state, chunk)
    middle = after.middle[:, None]
    between = _between(of, middle)
    chunk = drawn.behind(chunk, after.sample.k, after.sample.v)
    seen, recent = slots.decode(spec, state.recent, chunk, of.sinks, of.by_rank, between=between)
    halves = _attend_halves(of, spec, after, chunk, chunk.valid, numbers, middle)
    return merge(seen, *halves), after._replace(recent=recent)


def _take(
    of: Leveled, spec: Spec, state: LeveledState, chunk: Chunk
) -> tuple[Partial, LeveledState]:
    """A chunk of a block at most: its queries see the levels as they were, or as they become when
    what has left the window fills the first; in both, what had come to it by then."""
    numbers = slots.number(state.recent, chunk.valid)
    leaving = drawn.leaving(spec, state.recent, chunk, of.sinks)
    gone = jnp.cumsum(leaving.there.astype(jnp.int32), axis=1)
    middle = state.middle[:, None] + gone.astype(jnp.uint32)  # as each query finds it
    until = tokens_until_full(of.shape, state.middle)[:, None]
    early = gone.astype(jnp.uint32) < until
    by = _reducer(of, spec)
    entered = enter(by, state.sample, state.middle, state.key, leaving)
    after = _after(state, *absorb(by, state.sample, state.middle, state.key, leaving))
    between = _between(of, middle)
    parts = [
        slots.attend(spec, state.recent, chunk, of.sinks, of.window, of.by_rank, between),
        *_attend_halves(
            of, spec, state._replace(sample=entered), chunk, chunk.valid & early, numbers, middle
        ),
        *_attend_halves(of, spec, after, chunk, chunk.valid & ~early, numbers, middle),
    ]
    recent = slots.extend(spec, state.recent, chunk, of.sinks, of.by_rank)
    return merge(*parts), after._replace(recent=recent)


def kept(of: Leveled, state: LeveledState) -> Kept:
    recent = slots.kept(state.recent)
    weights = _bias(of, state.middle[:, None], state.key)[:, :, 0]
    return Kept(
        jnp.concatenate([recent.positions, state.sample.positions], axis=2),
        jnp.concatenate([recent.log_weight, weights], axis=2),
    )


def settling(of: Leveled) -> Settling:
    """All levels but the first, half a block each."""
    return Settling(SAMPLE, of.shape.block, of.shape.half)


def settled(of: Leveled, tokens: int) -> tuple[int, ...]:
    """After how many tokens of a row each of them was last written."""
    before = of.sinks + of.window
    middle = tokens - before
    if middle >= LAST:  # folded: it is told no more
        return (tokens,) * (of.shape.levels - 1)
    return tuple(last and last + before for last in settled_levels(of.shape, max(0, middle)))


def _between(of: Leveled, middle: UInt32[Array, "B T"]) -> Int32[Array, "B T"]:
    return jnp.sum(fills(of.shape, middle), axis=-1, dtype=jnp.int32)


def _bias(
    of: Leveled, middle: UInt32[Array, "B T"], key: UInt32[Array, "B K 2"]
) -> Float32[Array, "B K T S"]:
    """Log weights as each query finds them, -inf where nothing is held."""
    weights = log_weights(of.shape, middle)[:, None] if of.weighted else np.float32(0)
    return jnp.where(held(of.shape, middle, key), weights, -jnp.inf)


def _attend_halves(
    of: Leveled,
    spec: Spec,
    state: LeveledState,
    chunk: Chunk,
    asks: Bool[Array, "B T"],
    numbers: Int32[Array, "B T"],
    middle: UInt32[Array, "B T"],
) -> list[Partial]:
    """Attention of the queries that ask over each half. Where keys are turned within it, a query is
    turned as far from it as it stands from its first slot."""
    rows, queries, heads, head_dim = chunk.q.shape
    kv_heads, size = state.key.shape[1], of.shape.half
    parts = of.shape.slots // size
    views = jnp.broadcast_to(chunk.positions[:, :, None], (rows, queries, parts))
    if of.by_rank:
        view = slots.view_by_rank(state.recent, numbers, _between(of, middle))
        first = (of.sinks + before_half(of.shape, middle)).astype(jnp.uint32)  # [B,T,P]
        views = view[:, :, None] - first
    q = jnp.broadcast_to(chunk.q[:, :, None], (rows, queries, parts, heads, head_dim))
    q = spec.encoding.rotate(q.reshape(rows, -1, heads, head_dim), views.reshape(rows, -1))
    # Halves as heads of their own: then none is sliced off, which would copy it.
    group = heads // kv_heads
    q = q.reshape(rows, queries, parts, kv_heads, group, head_dim).transpose(0, 1, 3, 2, 4, 5)
    bias = jnp.where(asks[:, None, :, None], _bias(of, middle, state.key), -jnp.inf)
    bias = bias.reshape(rows, kv_heads, 1, queries, parts, size)
    if of.by_rank:  # a query's distance from a slot is that from the first less the slot's place
        slot = jnp.broadcast_to(jnp.arange(size, dtype=jnp.uint32)[None], (rows, size))
        penalties = [spec.encoding.bias(views[:, :, part], slot, kv_heads) for part in range(parts)]
    else:
        places = state.sample.positions.reshape(rows, kv_heads, parts, size)
        penalties = [
            spec.encoding.bias(chunk.positions, places[:, :, part], kv_heads)
            for part in range(parts)
        ]
    if penalties[0] is not None:
        bias = bias + jnp.stack(penalties, axis=4)
    bias = bias.transpose(0, 1, 4, 2, 3, 5)
    partial = slot_attention(
        q.reshape(rows, queries, parts * heads, head_dim),
        *(leaf.reshape(rows, kv_heads * parts, size, -1) for leaf in state.sample[:2]),
        bias.reshape(rows, kv_heads * parts, *bias.shape[3:]),
        spec.scale, spec.softcap,
    )  # fmt: skip
    out = partial.out.reshape(rows, queries, kv_heads, parts, group, head_dim)
    lse = partial.lse.reshape(rows, queries, kv_heads, parts, group)
    return [
        Partial(out[:, :, :, part].reshape(chunk.q.shape),
                lse[:, :, :, part].reshape(rows, queries, heads))
        for part in range(parts)
    ]  # fmt: skip


def _leave_one(of: Leveled, spec: Spec, state: LeveledState, chunk: Chunk) -> LeveledState:
    """The sample once the oldest of the ring has left it for one new token."""
    leaving = drawn.oldest(state.recent, chunk, of.sinks)
    by = _reducer(of, spec)
    return _after(state, *absorb(by, state.sample, state.middle, state.key, leaving))


def _after(state: LeveledState, sample: Sample, middle: Array) -> LeveledState:
    return state._replace(sample=sample, middle=middle)


def _reducer(of: Leveled, spec: Spec) -> Reducer:
    def chosen(keys: Array, values: Array, chances: Array) -> Array:
        return halve(of.how, spec.scale, keys, values, chances).chosen

    return Reducer(of.shape, chosen, of.by_rank, spec)
