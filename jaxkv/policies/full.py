"""Full attention (Vaswani et al. 2017): every token is cached, up to a stated maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxkv import rows
from jaxkv.cache import ring
from jaxkv.cache.ring import Ring
from jaxkv.contract import Cached, Chunk, Partial, Policy, Spec
from jaxkv.errors import UserError
from jaxkv.rows import Storage


@dataclass(frozen=True)
class Full(Policy):
    """Cache every token, in `start` slots that `reserve` doubles as they fill, up to `max`.

    This is exact attention (section 3.2), the reference for every other policy. Memory and the time
    of a token grow with the text. Positions are absolute, so the text must fit the trained context.

    The caller of `step` calls `reserve` between calls, because slots cannot grow inside a call. A
    call with more tokens than slots raises UserError. A compiled call cannot raise, so there the
    sequence outputs NaN from then on. storage: as in streaming.
    """

    max: int = 131072
    start: int = 512
    storage: Storage = "float"

    summary: ClassVar[str] = "every token, up to a maximum"
    source: ClassVar[str] = "Attention Is All You Need, arXiv 1706.03762"
    grows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max < 1 or self.start < 1:
            raise UserError(
                f"max and start must be at least 1, got {self.max} and {self.start}; try "
                "start=512,max=4096"
            )
        rows.check(self.storage)

    @property
    def leaves(self) -> Ring:
        return ring.leaves(self.storage, 0, ring.DENSE_LEAVES)

    @property
    def max_lookback(self) -> int:
        return self.max

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> Ring:
        return ring.init(spec, batch, min(self.start, self.max), self.storage)

    def update(self, spec: Spec, state: Ring, chunk: Chunk) -> tuple[Partial, Ring]:
        return ring.update(spec, state, chunk, ring.dense_settings(state))

    def cached(self, spec: Spec, state: Ring) -> Cached:
        return ring.cached(state)

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        start = min(self.start, self.max)
        return ring.nbytes(spec, rows.slots_for(tokens, start, self.max), self.storage)

    def reserve(self, spec: Spec, state: Ring, tokens: int) -> Ring:
        """Room for `tokens` in all; raises UserError beyond `max`. Shapes change: not in loops."""
        return ring.reserve(state, tokens, self.max)
