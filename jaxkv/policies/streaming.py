"""StreamingLLM (Xiao et al. 2024): the first tokens as sinks, and a window of the newest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax

from jaxkv.cache import ring
from jaxkv.cache.ring import Ring
from jaxkv.contract import Cached, Chunk, Partial, Policy, Spec


@dataclass(frozen=True)
class Streaming(Policy):
    """Cache the first `sinks` tokens and the newest `window`, the query's own included.

    A softmax must put its weight somewhere, and trained models put what they do not need on the
    first tokens: these are attention sinks. Keeping a few of them beside the window keeps the
    softmax as it was in training, so the loss stays flat on an endless text (section 3.1).

    positions: `cache` numbers tokens by their position within the cache (section 3.2), so that no
    distance exceeds the trained context; `absolute` by their position in the text, as some ports
    do. The published code evicts after attending and so sees one key more.
    """

    sinks: int = 4
    window: int = 252
    positions: Literal["cache", "absolute"] = "cache"

    summary: ClassVar[str] = "first tokens as sinks, and a window of the newest"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    leaves: ClassVar[Ring] = ring.LEAVES

    def __post_init__(self) -> None:
        ring.check(self.sinks, self.window, self.positions)

    @property
    def cache_relative(self) -> bool:
        return self.positions == "cache"

    @property
    def max_lookback(self) -> int | float:
        return self.sinks + self.window if self.cache_relative else math.inf

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> Ring:
        return ring.init(spec, batch, self.sinks + self.window)

    def update(self, spec: Spec, state: Ring, chunk: Chunk) -> tuple[Partial, Ring]:
        return ring.update(spec, state, chunk, self.sinks, self.window, self.cache_relative)

    def cached(self, spec: Spec, state: Ring) -> Cached:
        return ring.cached(state)

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        """(sinks + window) * (2 * K * H * itemsize + 4) + 4"""
        return ring.nbytes(spec, self.sinks + self.window)
