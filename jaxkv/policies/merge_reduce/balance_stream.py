"""BalanceKV (Han et al. 2025) on a stream: evicted tokens are halved level by level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxkv.errors import UserError
from jaxkv.pallas_kernels import import_pallas
from jaxkv.policies.discrepancy import Halving
from jaxkv.policies.merge_reduce.base import TreePolicy
from jaxkv.policies.merge_reduce.occupancy import TreeSize
from jaxkv.rows import Storage


@dataclass(frozen=True)
class BalanceStream(TreePolicy):
    """Cache the first `sinks` tokens, the newest `window`, and a balanced sample of the others.

    If a self-balancing walk halves a block, attention to the block stays almost unchanged. The
    error falls faster with the sample size than that of a random sample (section 3). Merge and
    reduce (Algorithm 3) halves level by level. Halving the last level in place, which is ours,
    keeps memory constant. Unlike Algorithm 1, there are no value-norm buckets, and one half
    serves numerator and denominator.

    levels, block: level 0 collects blocks of `block` evicted tokens. A full block is halved, and
    the tokens that stay move to the next level, where each represents twice as many. When the last
    level is full, it is halved in place, and level 0 takes one of two evicted tokens, later one of
    four, so memory is constant. The sample has block/2 x (levels + 1) slots, of which (levels + 2)
    / (2 levels + 2) are filled on average. With few levels more slots are filled, but a large block
    needs more temporary memory to halve. mode, key_scale, c: as in balance. weighted: a token
    counts for all tokens that it represents; otherwise it counts once. positions: as in streaming.
    exponent: as in reservoir. storage: as in streaming.
    """

    sinks: int = 4
    window: int = 156
    levels: int = 2
    block: int = 64
    mode: Literal["walk", "pairs", "coin"] = "pairs"
    key_scale: float = 0.1
    c: float = 0.25
    weighted: bool = False
    positions: Literal["relative", "absolute"] = "relative"
    exponent: float = 1.0
    storage: Storage = "float"

    summary: ClassVar[str] = "sinks, a window, and a balanced sample of the evicted tokens"
    source: ClassVar[str] = "BalanceKV, arXiv 2502.07861"

    def __post_init__(self) -> None:
        import_pallas()
        super().__post_init__()
        if self.levels < 1:
            raise UserError(f"levels must be at least 1, got {self.levels}; try levels=2")
        if self.block < 2 or self.block & (self.block - 1):
            raise UserError(f"block must be 2, 4, 8, ..., got {self.block}; try block=64")
        if self.block << self.levels > 2**24:
            raise UserError(
                f"block x 2^levels must be {2**24} at most, got block={self.block} and "
                f"levels={self.levels}; try block=64,levels=2"
            )
        _ = self.halving  # checks its settings

    @property
    def size(self) -> TreeSize:
        return TreeSize(self.levels, self.block)

    @property
    def halving(self) -> Halving:
        return Halving(self.mode, self.key_scale, self.c)
