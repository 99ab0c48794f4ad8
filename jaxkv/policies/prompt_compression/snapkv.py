"""SnapKV (Li et al. 2024): the tokens of a finished prompt that its last queries attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import rows
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Spec
from jaxkv.errors import UserError, check_choice
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import (
    Budgets,
    CompressedState,
    CompressionPolicy,
    ExactEnds,
)
from jaxkv.rows import Storage
from jaxkv.typing import Array, Float32

MAX_KERNEL = 1023  # neighbours; the time of pooling grows with them


@dataclass(frozen=True)
class SnapKV(CompressionPolicy):
    """Keep a prompt's last `window` tokens and the tokens before them that these attend to most.

    The answer attends largely to the same tokens as the end of the prompt (section 3). So the
    attention of the last queries, the observation window, selects the tokens to keep.

    The compressed prompt has `capacity` tokens; generated tokens are cached exactly. Attention is
    summed over the last `window` queries, pooled over `kernel` neighbours, and averaged over the
    query heads of a KV head. pool: max or mean over the neighbours. The defaults are those of the
    published LongBench runs. A prompt of at most `capacity` tokens is not compressed. budgets: as
    in keydiff. start: slots before the prompt, doubled as they fill. storage: as in streaming.
    """

    capacity: int = 1024
    window: int = 32
    kernel: int = 7
    pool: Literal["max", "mean"] = "max"
    budgets: Budgets = "equal"
    start: int = 512
    storage: Storage = "float"

    summary: ClassVar[str] = "the tokens of a prompt that its last queries attend to"
    source: ClassVar[str] = "SnapKV, arXiv 2404.14469"

    def __post_init__(self) -> None:
        base.check_ends(self.ends, self.start)
        super().__post_init__()
        if not self.window < self.capacity <= rows.MAX_SLOTS:
            raise UserError(
                f"capacity must be more than window and {rows.MAX_SLOTS} at most, got "
                f"{self.capacity} and {self.window}; try capacity=1024,window=32"
            )
        if not 1 <= self.kernel <= MAX_KERNEL or self.kernel % 2 == 0:
            raise UserError(
                f"kernel must be one of 1, 3, 5 to {MAX_KERNEL}, got {self.kernel}; try kernel=7"
            )
        check_choice("pool", self.pool, ("max", "mean"))

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(0, self.window)

    @property
    def num_queries(self) -> int:
        return self.window

    @property
    def min_prompt(self) -> int:
        return self.capacity + 1

    def choose(
        self, spec: Spec, state: CompressedState, tokens: PerHeadTokens, count: Array
    ) -> base.Chosen:
        # A choice has no gradient.
        attention = jax.lax.stop_gradient(base.attention_of_last_queries(spec, state))
        size = tokens.positions.shape[2]
        valid = jnp.arange(size)[None, None] < count[:, None, None]
        score = jnp.where(valid[:, :, None], attention[..., :size], 0)
        score = jnp.mean(self._pooled(score), axis=2)
        return base.keep_best(tokens, count, score, self.capacity - self.window, self.budgets)

    def _pooled(self, score: Float32[Array, "B K G S"]) -> Float32[Array, "B K G S"]:
        """Pooled over neighbours. A mean counts places beyond the ends as zeros."""
        start, combine = (0.0, jax.lax.add) if self.pool == "mean" else (-np.inf, jax.lax.max)
        side = self.kernel // 2
        pooled = jax.lax.reduce_window(
            score,
            jnp.float32(start),
            combine,
            (1, 1, 1, self.kernel),
            (1, 1, 1, 1),
            ((0, 0), (0, 0), (0, 0), (side, side)),
        )
        return pooled / jnp.float32(self.kernel) if self.pool == "mean" else pooled
