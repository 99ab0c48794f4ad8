"""Reservoir sampling (Pan et al.): sinks, a window, and a random sample of what lies between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import sample as drawn
from jaxkv import slots
from jaxkv.attention import merge
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.pieces import in_pieces
from jaxkv.sample import Leaving, Sample
from jaxkv.slots import Slots
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32

_MOST = np.int32(2**31 - 1)
_PIECE = 128  # tokens of a chunk whose masks over ring, sample and chunk stand at a time
_BY_RANK = 16  # and those that each have a sample of their own


class ReservoirState(NamedTuple):
    """recent: sinks and ring. middle: how many tokens have left the ring. key: of the draws."""

    recent: Slots
    sample: Sample
    middle: Int32[Array, " B"]
    key: UInt32[Array, "B K 2"]


@dataclass(frozen=True)
class Reservoir:
    """Keep the first `sinks` tokens, the newest `window`, and `sample` of those between.

    scheme: `uniform`, every token that left the window is in the sample with one probability,
    sample over how many have left (equations 1 and 2); `geometric`, the paper's listing as it
    runs: each newcomer takes a place with probability sample / (sample + 1), so that a sample
    holds what is about `sample` tokens old. weighted: a sampled token counts for all that it
    stands for (Horvitz-Thompson), which only `uniform` knows. positions: as in streaming.
    """

    sinks: int = 4
    window: int = 126
    sample: int = 126
    scheme: Literal["uniform", "geometric"] = "uniform"
    weighted: bool = False
    positions: Literal["cache", "absolute"] = "cache"

    summary: ClassVar[str] = "sinks, a window, and a random sample of what lies between"
    source: ClassVar[str] = "Pan et al., reservoir sampling for StreamingLLM"
    formula: ClassVar[str] = (
        "(sinks + window) * (2 * K * H * itemsize + 4) + K * sample * (2 * H * itemsize + 4)"
        " + 8 * K + 8"
    )
    axes: ClassVar[ReservoirState] = ReservoirState(slots.AXES, drawn.AXES, ("B",), ("B", "K", "2"))
    shared: ClassVar[tuple[str, ...]] = drawn.SHARED

    def __post_init__(self) -> None:
        slots.check(self.sinks, self.window, self.positions)
        if self.sample < 1:
            raise UserError(f"sample must be at least 1, got {self.sample}; try sample=126")
        if self.scheme not in ("uniform", "geometric"):
            raise UserError(f"scheme must be uniform or geometric, got {self.scheme!r}")
        if self.weighted and self.scheme == "geometric":
            raise UserError("weighted=true belongs to scheme=uniform, got geometric; leave one out")

    @property
    def by_rank(self) -> bool:
        return self.positions == "cache"

    @property
    def reach(self) -> int | float:
        return self.sinks + self.sample + self.window if self.by_rank else math.inf

    def init(self, spec: Spec, rows: int, key: jax.Array) -> ReservoirState:
        return ReservoirState(
            slots.init(spec, rows, self.sinks + self.window),
            drawn.init(spec, rows, self.sample),
            jnp.zeros((rows,), jnp.int32),
            drawn.keys(key, spec, rows),
        )

    def attend(self, spec: Spec, state: ReservoirState, chunk: Chunk) -> Partial:
        return self.take(spec, state, chunk)[0]

    def take(
        self, spec: Spec, state: ReservoirState, chunk: Chunk
    ) -> tuple[Partial, ReservoirState]:
        size = _BY_RANK if self.by_rank else _PIECE
        return in_pieces(partial(self._take, spec), state, chunk, size)

    def extend(self, spec: Spec, state: ReservoirState, chunk: Chunk) -> ReservoirState:
        if chunk.valid.shape[1] == 1:
            return self._extend_one(spec, state, chunk)
        leaving = drawn.leaving(spec, state.recent, chunk, self.sinks)
        return self._extend(spec, state, chunk, leaving, *self._absorb(state, leaving))

    def _take(
        self, spec: Spec, state: ReservoirState, chunk: Chunk
    ) -> tuple[Partial, ReservoirState]:
        if chunk.valid.shape[1] == 1:
            return self.decode(spec, state, chunk)
        leaving = drawn.leaving(spec, state.recent, chunk, self.sinks)
        held, middle = self._absorb(state, leaving)  # [B,K,T,R], [B,T]
        between = jnp.minimum(middle, self.sample)
        recent = slots.attend(
            spec, state.recent, chunk, self.sinks, self.window, self.by_rank, between
        )
        weight = jnp.where(chunk.valid, self._log_weight(middle), -jnp.inf)
        tokens = drawn.join(state.sample, leaving.tokens)
        if self.by_rank:
            numbers = slots.number(state.recent, chunk.valid)
            view = slots.view_by_rank(state.recent, numbers, between)
            sample = self._attend_by_rank(spec, chunk.q, view, tokens, held, middle, weight)
        else:
            seen = jnp.where(self._filled(middle), weight[:, None, :, None], -jnp.inf)
            rows, heads, times = np.ix_(*map(np.arange, held.shape[:3]))
            bias = jnp.full((*held.shape[:3], tokens.positions.shape[2]), -jnp.inf)
            bias = bias.at[rows[..., None], heads[..., None], times[..., None], held].max(seen)
            sample = drawn.attend(spec, chunk.q, chunk.positions, tokens, bias)
        after = self._extend(spec, state, chunk, leaving, held, middle)
        return merge(recent, sample), after

    def _attend_by_rank(
        self, spec: Spec, q: Array, view: UInt32[Array, "B T"], tokens: Sample,
        held: Int32[Array, "B K T S"], middle: Int32[Array, "B T"], weight: Float32[Array, "B T"],
    ) -> Partial:  # fmt: skip
        """Each query over the sample as it finds it, at the ranks that it has then: queries as rows
        of their own."""
        rows, kv_heads, queries, size = held.shape
        found = drawn.pick(tokens, held.reshape(rows, kv_heads, -1))

        def split(leaf: Array) -> Array:
            leaf = jnp.moveaxis(leaf.reshape(*held.shape, *leaf.shape[3:]), 2, 1)
            return leaf.reshape(rows * queries, *leaf.shape[2:])

        each = lambda leaf: leaf.reshape(rows * queries, 1, *leaf.shape[2:])  # noqa: E731
        sample = self._turned(spec, Sample(*map(split, found)), each(middle))
        bias = jnp.where(self._filled(each(middle)), each(weight)[:, :, None, None], -jnp.inf)
        bias = jnp.broadcast_to(bias, (rows * queries, kv_heads, 1, size))
        partial = drawn.attend(spec, each(q), each(view), sample, bias)
        return Partial(*(leaf.reshape(rows, queries, *leaf.shape[2:]) for leaf in partial))

    def _extend(
        self, spec: Spec, state: ReservoirState, chunk: Chunk, leaving: Leaving,
        held: Int32[Array, "B K T S"], middle: Int32[Array, "B T"],
    ) -> ReservoirState:  # fmt: skip
        return state._replace(
            recent=slots.extend(spec, state.recent, chunk, self.sinks, self.by_rank),
            sample=drawn.pick(drawn.join(state.sample, leaving.tokens), held[:, :, -1]),
            middle=middle[:, -1],
        )

    def decode(
        self, spec: Spec, state: ReservoirState, chunk: Chunk
    ) -> tuple[Partial, ReservoirState]:
        after = self._leave_one(state, chunk)
        chunk = drawn.behind(chunk, after.sample.k, after.sample.v)
        between = jnp.minimum(after.middle, self.sample)[:, None]
        seen, recent = slots.decode(
            spec, state.recent, chunk, self.sinks, self.by_rank, between=between
        )
        middle, view, sample = after.middle[:, None], chunk.positions, after.sample
        weight = jnp.where(chunk.valid, self._log_weight(middle), -jnp.inf)
        bias = jnp.where(self._filled(middle), weight[:, None, :, None], -jnp.inf)
        bias = jnp.broadcast_to(bias, (*state.key.shape[:2], 1, self.sample))
        if self.by_rank:
            numbers = slots.number(state.recent, chunk.valid)
            view = slots.view_by_rank(state.recent, numbers, between)
            sample = self._turned(spec, sample, middle)
        partial = merge(seen, drawn.attend(spec, chunk.q, view, sample, bias))
        return partial, after._replace(recent=recent)

    def kept(self, spec: Spec, state: ReservoirState) -> Kept:
        recent, sample = slots.kept(state.recent), state.sample
        held = self._filled(state.middle[:, None])[:, 0]
        weight = jnp.where(held, self._log_weight(state.middle)[:, None, None], -jnp.inf)
        weight = jnp.broadcast_to(weight, sample.positions.shape)
        return Kept(
            jnp.concatenate([recent.positions, sample.positions], axis=2),
            jnp.concatenate([recent.log_weight, weight], axis=2),
        )

    def _extend_one(self, spec: Spec, state: ReservoirState, chunk: Chunk) -> ReservoirState:
        recent = slots.extend(spec, state.recent, chunk, self.sinks, self.by_rank)
        return self._leave_one(state, chunk)._replace(recent=recent)

    def _leave_one(self, state: ReservoirState, chunk: Chunk) -> ReservoirState:
        """The sample once the oldest of the ring has left it for one new token."""
        sample = state.sample
        token, _, there = drawn.oldest(state.recent, chunk, self.sinks)
        leaves = there[:, 0]
        draw = drawn.draws(token.positions, state.key)[:, :, 0]
        held = drawn.draws(sample.positions, state.key)
        at, takes = self._place(held, state.middle, draw)
        takes &= leaves[:, None]
        sample = drawn.put(sample, at, takes, *(leaf[:, :, 0] for leaf in token))
        return state._replace(sample=sample, middle=_add(state.middle, leaves))

    def _place(
        self, held: UInt32[Array, "B K S"], middle: Int32[Array, " B"], draw: UInt32[Array, "B K"]
    ) -> tuple[Int32[Array, "B K"], Bool[Array, "B K"]]:
        """Where a token goes that leaves the window, and whether it does.

        held: the draws of the sample. middle: how many left before.
        """
        if self.scheme == "uniform":  # the sample is what has the smallest draws of all
            at = jnp.argmax(held, axis=2).astype(jnp.int32)
            takes = draw < jnp.max(held, axis=2)
        else:
            at = (draw % np.uint32(self.sample + 1)).astype(jnp.int32)
            takes = at < self.sample
        filling = (middle < self.sample)[:, None]
        return jnp.where(filling, middle[:, None], at), filling | takes

    def _absorb(
        self, state: ReservoirState, leaving: Leaving
    ) -> tuple[Int32[Array, "B K T S"], Int32[Array, "B T"]]:
        """What each slot of the sample holds after each token, and how many have left by then.

        A place below `sample` is that slot of the old sample, others are places in leaving.tokens.
        """
        draws = drawn.draws(leaving.tokens.positions, state.key)
        place = jnp.arange(self.sample)[None, None]

        def one(carry: tuple, new: tuple) -> tuple[tuple, tuple]:
            source, held, middle = carry
            at, there = new
            draw = jnp.take_along_axis(draws, at[:, None, None], axis=2)[:, :, 0]
            slot, takes = self._place(held, middle, draw)
            here = (place == slot[:, :, None]) & (takes & there[:, None])[:, :, None]
            source = jnp.where(here, self.sample + at[:, None, None], source)
            carry = source, jnp.where(here, draw[:, :, None], held), _add(middle, there)
            return carry, (source, carry[2])

        source = jnp.broadcast_to(place, state.sample.positions.shape).astype(jnp.int32)
        begin = source, drawn.draws(state.sample.positions, state.key), state.middle
        _, (sources, middles) = jax.lax.scan(one, begin, (leaving.at.T, leaving.there.T))
        return jnp.moveaxis(sources, 0, 2), middles.T

    def _turned(self, spec: Spec, sample: Sample, middle: Int32[Array, "B 1"]) -> Sample:
        """A sample turned on from where its tokens stood to their ranks."""
        ranks = self.sinks + drawn.ranks(sample, self._filled(middle)[:, 0])
        ranks = ranks.astype(jnp.uint32)
        return Sample(drawn.move(spec, sample.k, ranks - sample.positions), sample.v, ranks)

    def _filled(self, middle: Int32[Array, "B T"]) -> Bool[Array, "B 1 T S"]:
        """The slots that hold a token once so many have left the window."""
        return jnp.arange(self.sample)[None, None, None] < middle[:, None, :, None]

    def _log_weight(self, middle: Int32[Array, "..."]) -> Float32[Array, "..."]:
        if not self.weighted:
            return jnp.zeros(middle.shape, jnp.float32)
        return jnp.log(jnp.maximum(middle.astype(jnp.float32) / np.float32(self.sample), 1))


def _add(count: Int32[Array, "..."], new: Array) -> Int32[Array, "..."]:
    """A sum that stays where int32 ends."""
    new = new.astype(jnp.int32)
    return jnp.minimum(count, _MOST - new) + new
