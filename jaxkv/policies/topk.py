"""Exact top-k attention: what a method that looks for the largest logits could at best find."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxkv import met
from jaxkv.met import Asked, MetState
from jaxkv.typing import Array, Float32


@dataclass(frozen=True)
class TopK:
    """Read a prompt exactly, keep every token, and let each query head of what is generated see
    the first `sinks` tokens, the newest `window`, and of those between the largest logits.

    share: so many of those between, rounded up; of equal logits the older. The softmax is over
    what is seen. (In the comparisons of MagicPIG it is a share of all positions, and there are no
    sinks and no window beside it.) start: slots before the prompt comes, doubled as they fill.
    """

    share: float = 0.1
    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = "every token; a query sees both ends, and between the largest logits"
    source: ClassVar[str] = "the TopK of MagicPIG, arXiv 2410.16179"
    formula: ClassVar[str] = met.FORMULA
    axes: ClassVar[MetState] = met.AXES
    shared: ClassVar[tuple[str, ...]] = met.SHARED
    appends: ClassVar[tuple[str, ...]] = met.APPENDS
    reach: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        met.check_share("share", self.share)
        met.check(self.sinks, self.window, self.start)

    init = met.init
    attend = met.attend
    take = decode = met.take
    reserve = staticmethod(met.reserve)
    seal = staticmethod(met.seal)
    extend = staticmethod(met.extend)
    kept = staticmethod(met.kept)

    def choose(self, asked: Asked) -> Float32[Array, "B K G T S"]:
        """The log weight of each key between, -inf of those that are not met."""
        count = met.part(self.share, asked.between)
        return met.only(met.largest(asked.logits, asked.between, count))
