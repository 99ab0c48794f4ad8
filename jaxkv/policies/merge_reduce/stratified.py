"""Stratified sampling of a stream: one token of each stretch of the evicted text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxkv.errors import UserError
from jaxkv.policies.discrepancy import Halving
from jaxkv.policies.merge_reduce.base import TreePolicy
from jaxkv.policies.merge_reduce.occupancy import TreeSize
from jaxkv.rows import Storage


@dataclass(frozen=True)
class Stratified(TreePolicy):
    """Cache the first `sinks` tokens, the newest `window`, and one of every 2^r tokens between.

    One random token of every stretch of 2^r tokens spreads the sample evenly over the text. Where
    neighbours are alike, its variance is lower than that of a uniform sample of the same size.

    When the sample has `sample` tokens, a coin keeps one of every two neighbours, and r grows by
    one. This is merge and reduce (BalanceKV, section 3.2) with one level, and coins in place of
    its balancing walk. weighted: a sampled token counts for its whole stretch; otherwise it counts
    once. positions: as in streaming. exponent: as in reservoir. storage: as in streaming.
    """

    sinks: int = 4
    window: int = 124
    sample: int = 128
    weighted: bool = False
    positions: Literal["relative", "absolute"] = "relative"
    exponent: float = 1.0
    storage: Storage = "float"

    summary: ClassVar[str] = "sinks, a window, and one token of every stretch of evicted text"
    source: ClassVar[str] = "stratified sampling, the baseline of BalanceKV and of reservoirs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.sample <= 2**20 or self.sample & (self.sample - 1):
            raise UserError(f"sample must be 2, 4, 8, ..., got {self.sample}; try sample=128")

    @property
    def size(self) -> TreeSize:
        return TreeSize(1, self.sample)

    @property
    def halving(self) -> Halving:
        return Halving("coin")
