"""A plain window (Beltagy et al. 2020): the newest tokens and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxkv import slots
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.slots import Slots


@dataclass(frozen=True)
class Window:
    """Keep the newest `window` tokens, the query's own among them.

    It is also what a model's own sliding-window layers do. A model trained without one falls
    apart once its first tokens are gone: that is the failure StreamingLLM mends.
    """

    window: int = 256

    summary: ClassVar[str] = "the newest tokens and nothing else"
    source: ClassVar[str] = "Longformer, arXiv 2004.05150; the baseline of StreamingLLM"
    formula: ClassVar[str] = "window * (2 * K * H * itemsize + 4) + 4"
    axes: ClassVar[Slots] = slots.AXES
    shared: ClassVar[tuple[str, ...]] = slots.SHARED

    def __post_init__(self) -> None:
        slots.check(0, self.window, "cache")

    @property
    def reach(self) -> int:
        return self.window

    def init(self, spec: Spec, rows: int, key: jax.Array) -> Slots:
        return slots.init(spec, rows, self.window)

    def attend(self, spec: Spec, state: Slots, chunk: Chunk) -> Partial:
        return slots.attend(spec, state, chunk, sinks=0, window=self.window)

    def extend(self, spec: Spec, state: Slots, chunk: Chunk) -> Slots:
        return slots.extend(spec, state, chunk, sinks=0)

    def decode(self, spec: Spec, state: Slots, chunk: Chunk) -> tuple[Partial, Slots]:
        return slots.decode(spec, state, chunk, sinks=0)

    def kept(self, spec: Spec, state: Slots) -> Kept:
        return slots.kept(state)
