"""Full attention: every token is kept, up to a stated maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxkv import exact, slots
from jaxkv.contract import Kept, Spec
from jaxkv.errors import UserError
from jaxkv.slots import Slots


@dataclass(frozen=True)
class Full:
    """Keep everything: `start` slots, doubled by `reserve` as they fill, never beyond `max`.

    Whoever drives `step` calls `reserve` between calls, for inside one the slots cannot grow. More
    tokens than slots raise UserError; in a compiled call, where nothing can be raised, the row
    answers NaN from then on, so that lost tokens cannot go unseen.
    """

    max: int = 131072
    start: int = 512

    summary: ClassVar[str] = "every token, up to a maximum"
    source: ClassVar[str] = "dense attention"
    formula: ClassVar[str] = "min(start, max) * (2 * K * H * itemsize + 4) + 4, doubling to max"
    axes: ClassVar[Slots] = slots.AXES
    shared: ClassVar[tuple[str, ...]] = slots.SHARED
    appends: ClassVar[tuple[str, ...]] = slots.APPENDS

    def __post_init__(self) -> None:
        if self.max < 1 or self.start < 1:
            raise UserError(f"max and start must be at least 1, got {self.max} and {self.start}")

    @property
    def reach(self) -> int:
        return self.max

    def init(self, spec: Spec, rows: int, key: jax.Array) -> Slots:
        return slots.init(spec, rows, min(self.start, self.max))

    def reserve(self, spec: Spec, state: Slots, tokens: int) -> Slots:
        """Room for `tokens` in all; raises UserError beyond `max`. Shapes change: not for loops."""
        return exact.reserve(state, tokens, self.max)

    attend = staticmethod(exact.attend)
    extend = staticmethod(exact.extend)
    decode = staticmethod(exact.decode)

    def kept(self, spec: Spec, state: Slots) -> Kept:
        return slots.kept(state)
