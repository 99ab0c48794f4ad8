"""A plain window (Beltagy et al. 2020): the newest tokens and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxkv import rows
from jaxkv.cache import ring
from jaxkv.cache.ring import Ring, RingSettings
from jaxkv.contract import Cached, Chunk, Partial, Policy, Spec
from jaxkv.rows import Storage


@dataclass(frozen=True)
class Window(Policy):
    """Cache the newest `window` tokens, the query's own included.

    Nearby tokens have most of the information that a language model needs, and memory is constant.
    But many models that were trained without a window put much of their attention on the first
    tokens. When the window evicts these tokens, the softmax loses its largest terms and the loss
    jumps (StreamingLLM, section 3.1). Layers that were trained with a sliding window use this
    policy without loss. storage: as in streaming.
    """

    window: int = 256
    storage: Storage = "float"

    summary: ClassVar[str] = "the newest tokens and nothing else"
    source: ClassVar[str] = "Longformer, arXiv 2004.05150; the baseline of StreamingLLM"

    def __post_init__(self) -> None:
        ring.check(0, self.window, "relative")
        rows.check(self.storage)

    @property
    def leaves(self) -> Ring:
        return ring.leaves(self.storage, 0)

    @property
    def max_lookback(self) -> int:
        return self.window

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> Ring:
        return ring.init(spec, batch, self.window, self.storage)

    def update(self, spec: Spec, state: Ring, chunk: Chunk) -> tuple[Partial, Ring]:
        return ring.update(spec, state, chunk, RingSettings(window=self.window))

    def cached(self, spec: Spec, state: Ring) -> Cached:
        return ring.cached(state)

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        return ring.nbytes(spec, self.window, self.storage)
