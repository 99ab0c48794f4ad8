"""PyramidKV (Cai et al. 2024): SnapKV with more tokens in the first layers than in the last."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxkv.errors import UserError
from jaxkv.policies.prompt_compression.base import CompressionPolicy, ExactEnds, Positions
from jaxkv.policies.prompt_compression.snapkv import SnapKV
from jaxkv.rows import Storage


@dataclass(frozen=True)
class PyramidKV(CompressionPolicy):
    """SnapKV with a budget that falls from layer to layer, about `capacity` tokens on average.

    Lower layers spread their attention widely and higher layers concentrate it on few tokens
    (section 3), so lower layers need more of the same total budget.

    beta: the last layer has 1/beta of the mean budget, besides the window. window, kernel, pool,
    every, positions, start, storage: as in snapkv. The step from layer to layer is rounded down, as
    in the published code, so the mean is above `capacity`, by less than half as many tokens as
    there are layers. A model with sliding-window layers misses the mean by more, because the
    budgets of these layers are not used. With `every`, a query sees at most the budget of its
    layer, the window and `every` tokens. It has no `budgets`, because its budgets are those of the
    layers.

    Here the budgets do not depend on the prompt. In the published code they do: a prompt of fewer
    than `capacity` tokens stays whole, all layers have the same budget up to twice as many tokens,
    and no layer has a budget above the length of the prompt.
    """

    capacity: int = 1024
    window: int = 32
    kernel: int = 7
    pool: Literal["max", "mean"] = "max"
    beta: int = 20
    every: int | None = None
    positions: Positions = None
    start: int = 512
    # Set by `for_layer`.
    layer: int = field(default=0, repr=False)
    layers: int = field(default=1, repr=False)
    storage: Storage = "float"

    summary: ClassVar[str] = "snapkv with a budget that falls from layer to layer"
    source: ClassVar[str] = "PyramidKV, arXiv 2406.02069"

    def __post_init__(self) -> None:
        if self.capacity <= self.window:
            raise UserError(
                f"capacity must be more than window, got {self.capacity} and {self.window}; try "
                "capacity=1024,window=32"
            )
        if self.beta < 1:
            raise UserError(f"beta must be at least 1, got {self.beta}; try beta=20")
        if not 0 <= self.layer < self.layers:
            raise UserError(
                f"layer must be one of {self.layers} layers, got {self.layer}; use 0 or more"
            )
        _ = self.scorer

    def for_layer(self, layer: int, num_layers: int) -> PyramidKV:
        return dataclasses.replace(self, layer=layer, layers=num_layers)

    @property
    def scorer(self) -> SnapKV:
        mean = self.capacity - self.window
        budget, minimum = mean, mean // self.beta
        if self.layers > 1:
            maximum = 2 * mean - minimum
            budget = maximum - self.layer * ((maximum - minimum) // (self.layers - 1))
        capacity = max(budget, 1) + self.window
        return SnapKV(
            capacity=capacity,
            window=self.window,
            kernel=self.kernel,
            pool=self.pool,
            every=self.every,
            positions=self.positions,
            start=self.start,
            storage=self.storage,
        )

    @property
    def ends(self) -> ExactEnds:
        return self.scorer.ends

    @property
    def budget(self) -> int:
        return self.scorer.budget
