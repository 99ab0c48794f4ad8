"""Exact top-k attention: the oracle baseline of methods that search for the largest logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxkv.policies.sparse_attention import base
from jaxkv.policies.sparse_attention.base import Candidates, SparsePolicy
from jaxkv.typing import Array, Float32


@dataclass(frozen=True)
class TopK(SparsePolicy):
    """Attend to the keys with the largest logits, found by reading all of them.

    A softmax is dominated by its largest logits, so methods that search for them approximate this
    policy (MagicPIG, section 3.1). It is their oracle baseline.

    Attention within the prompt is exact. After it, each query head sees the first `sinks` tokens,
    the newest `window`, and of the others the `share` with the largest logits, rounded up. Of equal
    logits the older key is taken. Every token stays cached. The softmax is over the keys that a
    query sees. In MagicPIG's comparisons the share is of all positions, without sinks and window.
    start: slots before the prompt, doubled as they fill.
    """

    share: float = 0.1
    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = "every token; a query attends to sinks, window and the largest logits"
    source: ClassVar[str] = "the TopK of MagicPIG, arXiv 2410.16179"

    def __post_init__(self) -> None:
        base.check_share("share", self.share)
        super().__post_init__()

    def select(self, candidates: Candidates) -> Float32[Array, "B K G T S"]:
        count = base.share_of(self.share, candidates.selectable)
        return base.unweighted(base.largest(candidates.logits, candidates.selectable, count))
