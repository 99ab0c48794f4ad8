"""StreamingLLM (Xiao et al. 2024): the first tokens as sinks, and a window of the newest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax

from jaxkv import slots
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.slots import Slots


@dataclass(frozen=True)
class Streaming:
    """Keep the first `sinks` tokens and the newest `window`, the newest token among them.

    positions: `cache` numbers tokens by their rank among the kept (section 3.2 of the paper), so
    that no distance leaves what the model was trained on; `absolute` by where they stand in the
    text, as some ports do. The published code evicts after attending and so sees one key more.
    """

    sinks: int = 4
    window: int = 252
    positions: Literal["cache", "absolute"] = "cache"

    summary: ClassVar[str] = "first tokens as sinks, and a window of the newest"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    formula: ClassVar[str] = "(sinks + window) * (2 * K * H * itemsize + 4) + 4"
    axes: ClassVar[Slots] = slots.AXES
    shared: ClassVar[tuple[str, ...]] = slots.SHARED

    def __post_init__(self) -> None:
        slots.check(self.sinks, self.window, self.positions)

    @property
    def by_rank(self) -> bool:
        return self.positions == "cache"

    @property
    def reach(self) -> int | float:
        return self.sinks + self.window if self.by_rank else math.inf

    def init(self, spec: Spec, rows: int, key: jax.Array) -> Slots:
        return slots.init(spec, rows, self.sinks + self.window)

    def attend(self, spec: Spec, state: Slots, chunk: Chunk) -> Partial:
        return slots.attend(spec, state, chunk, self.sinks, self.window, self.by_rank)

    def extend(self, spec: Spec, state: Slots, chunk: Chunk) -> Slots:
        return slots.extend(spec, state, chunk, self.sinks, self.by_rank)

    def decode(self, spec: Spec, state: Slots, chunk: Chunk) -> tuple[Partial, Slots]:
        return slots.decode(spec, state, chunk, self.sinks, self.by_rank)

    def kept(self, spec: Spec, state: Slots) -> Kept:
        return slots.kept(state)
