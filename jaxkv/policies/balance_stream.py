"""BalanceKV (Han et al. 2025) without end: what leaves the window is halved level by level."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax

from jaxkv import leveled, slots
from jaxkv import sample as drawn
from jaxkv.contract import Chunk, Kept, Partial, Settling, Spec
from jaxkv.errors import UserError
from jaxkv.halving import Halving
from jaxkv.leveled import Leveled, LeveledState
from jaxkv.occupancy import Shape


@dataclass(frozen=True)
class BalanceStream:
    """Keep the first `sinks` tokens, the newest `window`, and merge and reduce those between.

    levels, block: tokens come in blocks of that many, which are halved level by level (Algorithm
    3), and what stays counts twice. When the last level is full, the first begins to take one token
    of two, then of four: the memory never grows. It holds block/2 x (levels + 1) tokens. mode,
    temperature, c: as in balance. weighted: a token counts for all that it stands for, or else
    once. positions: as in streaming.
    """

    sinks: int = 4
    window: int = 124
    levels: int = 3
    block: int = 64
    mode: Literal["walk", "pairs", "coin"] = "pairs"
    temperature: float = 0.1
    c: float = 0.25
    weighted: bool = False
    positions: Literal["cache", "absolute"] = "cache"

    summary: ClassVar[str] = "sinks, a window, and what lies between balanced against itself"
    source: ClassVar[str] = "BalanceKV, arXiv 2502.07861"
    formula: ClassVar[str] = (
        "(sinks + window) * (2 * K * H * itemsize + 4)"
        " + K * (levels + 1) * block // 2 * (2 * H * itemsize + 4) + 8 * K + 8"
    )
    axes: ClassVar[LeveledState] = leveled.AXES
    shared: ClassVar[tuple[str, ...]] = drawn.SHARED

    def __post_init__(self) -> None:
        slots.check(self.sinks, self.window, self.positions)
        if self.levels < 1:
            raise UserError(f"levels must be at least 1, got {self.levels}; try levels=3")
        if self.block < 2 or self.block & (self.block - 1):
            raise UserError(f"block must be 2, 4, 8, ..., got {self.block}; try block=64")
        if self.block << self.levels > 2**24:
            raise UserError(
                f"block x 2^levels must be {2**24} at most, got block={self.block} and "
                f"levels={self.levels}; try block=64,levels=3"
            )
        _ = self._leveled

    @property
    def _leveled(self) -> Leveled:
        how = Halving(self.mode, self.temperature, self.c)
        shape = Shape(self.levels, self.block)
        by_rank = self.positions == "cache"
        return Leveled(self.sinks, self.window, shape, how, self.weighted, by_rank)

    @property
    def reach(self) -> int | float:
        if self.positions == "cache":
            return self.sinks + self._leveled.shape.slots + self.window
        return math.inf

    @property
    def settling(self) -> Settling:
        return leveled.settling(self._leveled)

    def settled(self, tokens: int) -> tuple[int, ...]:
        return leveled.settled(self._leveled, tokens)

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
