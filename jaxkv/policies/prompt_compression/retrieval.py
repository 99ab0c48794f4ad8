"""Retrieval: the least alike keys of a prompt, in as many tokens per KV head as its heads need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import (
    Budgets,
    CompressionPolicy,
    ExactEnds,
    Positions,
)
from jaxkv.policies.prompt_compression.head_shares import LayerBudgets
from jaxkv.policies.prompt_compression.keydiff import KeyDiff
from jaxkv.rows import Storage


@dataclass(frozen=True)
class Retrieval(CompressionPolicy):
    """Keep a prompt's ends and, of the others, those whose keys differ most from their head's mean.

    Few KV heads retrieve: they attend to the one sentence that answers a question. With the same
    budget in every head, a cache evicts that sentence from them. Here the heads of a layer compete
    for its budget, each with at least a fifth of an equal share (AdaKV, arXiv 2407.11550). Keys are
    scored before their rotation, because a rotation makes keys of one direction look different
    (keydiff, keys=unrotated).

    The compressed prompt has `capacity` tokens per KV head on average. Its first `sinks` and last
    `window` tokens are among them, in every head. Generated tokens are cached exactly. A prompt of
    at most `capacity` tokens is not compressed. budgets, calibration, every, positions, start: as
    in keydiff. storage: as in streaming. With `every`, a sentence that left the window can stay
    cached in the heads that retrieve.
    """

    capacity: int = 1024
    sinks: int = 4
    window: int = 32
    budgets: Budgets = "adaptive"
    calibration: str | None = None
    every: int | None = None
    positions: Positions = None
    start: int = 512
    storage: Storage = "float"
    layer_budgets: LayerBudgets | None = field(default=None, repr=False)  # set by `for_layer`

    summary: ClassVar[str] = "a prompt's ends, and the tokens whose keys differ most, by head"
    source: ClassVar[str] = "KeyDiff, arXiv 2504.15364, with the budgets of AdaKV, 2407.11550"

    def __post_init__(self) -> None:
        base.check_ends(self.ends, self.start)
        base.check_capacity(self.capacity, self.start, sinks=self.sinks, window=self.window)
        super().__post_init__()

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(self.sinks, self.window)

    @property
    def scorer(self) -> KeyDiff:
        return KeyDiff(self.capacity, "unrotated", every=self.every, storage=self.storage)
