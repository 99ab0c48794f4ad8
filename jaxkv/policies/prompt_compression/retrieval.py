"""Retrieval: the least alike keys of a prompt, in as many tokens per KV head as its heads need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Spec
from jaxkv.policies.prompt_compression import base, keydiff
from jaxkv.policies.prompt_compression.base import (
    Budgets,
    CompressedState,
    CompressionPolicy,
    ExactEnds,
)
from jaxkv.rows import Storage
from jaxkv.typing import Array


@dataclass(frozen=True)
class Retrieval(CompressionPolicy):
    """Keep a prompt's ends and, of the others, the tokens with the least alike keys of a layer.

    Few KV heads retrieve: they attend to the one sentence that answers a question. With the same
    budget in every head, a cache evicts that sentence from them. Here the heads of a layer compete
    for its budget, each with at least a fifth of an equal share (AdaKV, arXiv 2407.11550). Keys are
    scored before their rotation, because a rotation makes keys of one direction look different
    (keydiff, keys=unrotated).

    The compressed prompt has `capacity` tokens per KV head on average. Its first `sinks` and last
    `window` tokens are among them, in every head. Generated tokens are cached exactly. A prompt of
    at most `capacity` tokens is not compressed. budgets, start: as in keydiff. storage: as in
    streaming.
    """

    capacity: int = 1024
    sinks: int = 4
    window: int = 32
    budgets: Budgets = "adaptive"
    start: int = 512
    storage: Storage = "float"

    summary: ClassVar[str] = "a prompt's ends, and the tokens with the least alike keys of a layer"
    source: ClassVar[str] = "KeyDiff, arXiv 2504.15364, with the budgets of AdaKV, 2407.11550"

    def __post_init__(self) -> None:
        base.check_ends(self.ends, self.start)
        base.check_capacity(self.capacity, self.sinks + self.window + 1, self.start)
        super().__post_init__()

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(self.sinks, self.window)

    @property
    def min_prompt(self) -> int:
        return self.capacity + 1

    def choose(
        self, spec: Spec, state: CompressedState, tokens: PerHeadTokens, count: Array
    ) -> base.Chosen:
        between = slice(self.sinks, self.sinks + tokens.positions.shape[2])
        difference = keydiff.score(spec, state.dense, "unrotated")[:, :, between]
        budget = self.capacity - self.sinks - self.window
        return base.keep_best(tokens, count, difference, budget, self.budgets)
