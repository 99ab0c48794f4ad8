"""Stratified sampling of a stream: one token of each stretch of what left the window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax

from jaxkv import leveled, slots
from jaxkv import sample as drawn
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.halving import Halving
from jaxkv.leveled import Leveled, LeveledState
from jaxkv.occupancy import Shape


@dataclass(frozen=True)
class Stratified:
    """Keep the first `sinks` tokens, the newest `window`, and one of every 2^r between.

    When `sample` stretches are full, a coin keeps one of two neighbours and r grows by one.
    weighted: a sampled token counts for its stretch, or else once. positions: as in streaming.
    """

    sinks: int = 4
    window: int = 124
    sample: int = 128
    weighted: bool = False
    positions: Literal["cache", "absolute"] = "cache"

    summary: ClassVar[str] = "sinks, a window, and one of every stretch that lies between"
    source: ClassVar[str] = "stratified sampling, the baseline of BalanceKV and of reservoirs"
    formula: ClassVar[str] = (
        "(sinks + window) * (2 * K * H * itemsize + 4) + K * sample * (2 * H * itemsize + 4)"
        " + 8 * K + 8"
    )
    axes: ClassVar[LeveledState] = leveled.AXES
    shared: ClassVar[tuple[str, ...]] = drawn.SHARED

    def __post_init__(self) -> None:
        slots.check(self.sinks, self.window, self.positions)
        if not 2 <= self.sample <= 2**20 or self.sample & (self.sample - 1):
            raise UserError(f"sample must be 2, 4, 8, ..., got {self.sample}; try sample=128")

    @property
    def _leveled(self) -> Leveled:
        by_rank = self.positions == "cache"
        shape, how = Shape(1, self.sample), Halving("coin")
        return Leveled(self.sinks, self.window, shape, how, self.weighted, by_rank)

    @property
    def reach(self) -> int | float:
        return self.sinks + self.sample + self.window if self.positions == "cache" else math.inf

    def init(self, spec: Spec, rows: int, key: jax.Array) -> LeveledState:
        return leveled.init(self._leveled, spec, rows, key)

    def attend(self, spec: Spec, state: LeveledState, chunk: Chunk) -> Partial:
        return leveled.attend(self._leveled, spec, state, chunk)

    def extend(self, spec: Spec, state: LeveledState, chunk: Chunk) -> LeveledState:
        return leveled.extend(self._leveled, spec, state, chunk)

    def take(self, spec: Spec, state: LeveledState, chunk: Chunk) -> tuple[Partial, LeveledState]:
        return leveled.take(self._leveled, spec, state, chunk)

    def decode(self, spec: Spec, state: LeveledState, chunk: Chunk) -> tuple[Partial, LeveledState]:
        return leveled.decode(self._leveled, spec, state, chunk)

    def kept(self, spec: Spec, state: LeveledState) -> Kept:
        return leveled.kept(self._leveled, state)
