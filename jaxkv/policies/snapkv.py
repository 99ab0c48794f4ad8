"""SnapKV (Li et al. 2024): of a finished prompt, the tokens that its last queries look at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import sample as drawn
from jaxkv import thinned
from jaxkv.contract import Spec
from jaxkv.errors import UserError
from jaxkv.sample import Sample
from jaxkv.thinned import Ends, ThinnedState
from jaxkv.typing import Array, Float32


@dataclass(frozen=True)
class SnapKV:
    """Keep the last `window` tokens of a prompt, and those before them that get most attention from
    the last `window` queries, `capacity` tokens in all; then what is generated.

    Attention is summed over the queries, pooled over `kernel` neighbours, and averaged over the
    heads that share a kv head. pool: whether their max or mean. The defaults are those of the
    published LongBench runs. A prompt of fewer tokens than `capacity` is kept whole. start: as in
    balance.
    """

    capacity: int = 1024
    window: int = 32
    kernel: int = 7
    pool: Literal["max", "mean"] = "max"
    start: int = 512

    summary: ClassVar[str] = "of a prompt, what its last queries look at"
    source: ClassVar[str] = "SnapKV, arXiv 2404.14469"
    formula: ClassVar[str] = (
        "start * (2 * K * H * itemsize + 4) + 4 + 8 * K + window * (4 * K * G * H + 4), doubling,"
        " until the prompt is sealed; then capacity tokens, and all that is generated"
    )
    axes: ClassVar[ThinnedState] = thinned.AXES
    shared: ClassVar[tuple[str, ...]] = thinned.SHARED
    appends: ClassVar[tuple[str, ...]] = thinned.APPENDS
    reach: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        thinned.check(self._ends, self.start)
        if not self.window < self.capacity <= thinned.MOST:
            raise UserError(
                f"capacity must be more than window and {thinned.MOST} at most, got "
                f"{self.capacity} and {self.window}; try capacity=1024,window=32"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"kernel must be 1, 3, 5, ..., got {self.kernel}; try kernel=7")
        if self.pool not in ("max", "mean"):
            raise UserError(f"pool must be max or mean, got {self.pool!r}")

    @property
    def _ends(self) -> Ends:
        return Ends(0, self.window)

    @property
    def least(self) -> int:
        return self.capacity + 1

    def init(self, spec: Spec, rows: int, key: jax.Array) -> ThinnedState:
        return thinned.init(spec, rows, key, self.start, self.window)

    def reserve(self, spec: Spec, state: ThinnedState, tokens: int) -> ThinnedState:
        return thinned.reserve(spec, state, tokens, self._ends)

    attend = staticmethod(thinned.attend)
    extend = staticmethod(thinned.extend)
    decode = staticmethod(thinned.decode)
    kept = staticmethod(thinned.kept)

    def seal(self, spec: Spec, state: ThinnedState) -> ThinnedState:
        attention = thinned.attention_of_last(spec, state)

        def choose(tokens: Sample, count: Array) -> tuple[Sample, Float32[Array, "B K C"]]:
            size = tokens.positions.shape[2]
            budget = min(size, self.capacity - self.window)
            there = jnp.arange(size)[None, None] < count[:, None, None]
            score = jnp.where(there[:, :, None], attention[..., :size], 0)
            score = jnp.mean(self._pooled(score), axis=2)
            _, best = jax.lax.top_k(jnp.where(there, score, -1), budget)
            taken = jnp.sort(jnp.where(jnp.take_along_axis(there, best, 2), best, size), axis=2)
            taken = jnp.minimum(taken, size - 1).astype(jnp.int32)
            return thinned.shorten(drawn.pick(tokens, taken), jnp.minimum(count, budget), 0.0)

        return thinned.seal(spec, state, self._ends, choose)

    def _pooled(self, score: Float32[Array, "B K G S"]) -> Float32[Array, "B K G S"]:
        """Over neighbours; beyond the ends stand zeros, which a mean counts."""
        start, how = (0.0, jax.lax.add) if self.pool == "mean" else (-np.inf, jax.lax.max)
        side = self.kernel // 2
        pooled = jax.lax.reduce_window(
            score, jnp.float32(start), how, (1, 1, 1, self.kernel), (1, 1, 1, 1),
            ((0, 0), (0, 0), (0, 0), (side, side)),
        )  # fmt: skip
        return pooled / jnp.float32(self.kernel) if self.pool == "mean" else pooled
