"""StreamingLLM (Xiao et al. 2024): the first tokens as sinks, and a window of the newest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax

from jaxkv import rows
from jaxkv.cache import ring
from jaxkv.cache.ring import Ring, RingSettings
from jaxkv.contract import Cached, Chunk, Partial, Policy, Spec
from jaxkv.rows import Storage


@dataclass(frozen=True)
class Streaming(Policy):
    """Cache the first `sinks` tokens and the newest `window`, the query's own included.

    The weights of a softmax sum to one. Many models put the weight that they do not need on the
    first tokens, which are called attention sinks. A cache that stores some sinks beside the window
    keeps the largest terms of the softmax, so the loss stays level on an endless text (section
    3.1).

    positions: with `relative`, a token's position is its index within the cache (section 3.2), so
    no distance exceeds the cache size. With `absolute`, it is the token's index in the text, as in
    some other implementations. The published code attends before it evicts, so its queries see one
    more key: a published cache of 4+252 equals `sinks=4,window=253` here.

    storage: with `int8`, keys and values are stored in int8, with a scale for each token and KV
    head, and sinks in full precision.
    """

    sinks: int = 4
    window: int = 252
    positions: Literal["relative", "absolute"] = "relative"
    storage: Storage = "float"

    summary: ClassVar[str] = "first tokens as sinks, and a window of the newest"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    def __post_init__(self) -> None:
        ring.check(self.sinks, self.window, self.positions)
        rows.check(self.storage)

    @property
    def leaves(self) -> Ring:
        return ring.leaves(self.storage, self.sinks)

    @property
    def cache_relative(self) -> bool:
        return self.positions == "relative"

    @property
    def _settings(self) -> RingSettings:
        return RingSettings(self.sinks, self.window, self.cache_relative)

    @property
    def max_lookback(self) -> int | float:
        return self.sinks + self.window if self.cache_relative else math.inf

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> Ring:
        return ring.init(spec, batch, self.sinks + self.window, self.storage, self.sinks)

    def update(self, spec: Spec, state: Ring, chunk: Chunk) -> tuple[Partial, Ring]:
        return ring.update(spec, state, chunk, self._settings)

    def cached(self, spec: Spec, state: Ring) -> Cached:
        return ring.cached(state)

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        return ring.nbytes(spec, self.sinks + self.window, self.storage, self.sinks)
