"""PyramidKV (Cai et al. 2024): SnapKV with more tokens in the first layers than in the last."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import jax

from jaxkv import thinned
from jaxkv.contract import Spec
from jaxkv.errors import UserError
from jaxkv.policies.snapkv import SnapKV
from jaxkv.thinned import ThinnedState


@dataclass(frozen=True)
class PyramidKV:
    """SnapKV whose budget falls from layer to layer, `capacity` tokens in the mean.

    beta: the last layer has 1/beta of the mean, beside the window. window, kernel, pool, start: as
    in snapkv. Here a budget does not depend on the prompt. The published code keeps a prompt of
    fewer tokens than `capacity` whole, gives all layers the same up to twice as many, and never
    gives the first layers more than the prompt has.
    """

    capacity: int = 1024
    window: int = 32
    kernel: int = 7
    pool: Literal["max", "mean"] = "max"
    beta: int = 20
    start: int = 512
    # Which of how many layers this is; `of_layer` says.
    layer: int = field(default=0, repr=False)
    layers: int = field(default=1, repr=False)

    summary: ClassVar[str] = "snapkv with a budget that falls from layer to layer"
    source: ClassVar[str] = "PyramidKV, arXiv 2406.02069"
    formula: ClassVar[str] = SnapKV.formula
    axes: ClassVar[ThinnedState] = thinned.AXES
    shared: ClassVar[tuple[str, ...]] = thinned.SHARED
    appends: ClassVar[tuple[str, ...]] = thinned.APPENDS
    reach: ClassVar[float] = math.inf

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
                f"layer must be one of {self.layers} layers, got {self.layer}; give 0 and more"
            )
        _ = self._snap

    def of_layer(self, layer: int, layers: int) -> PyramidKV:
        """The policy of one layer."""
        return dataclasses.replace(self, layer=layer, layers=layers)

    @property
    def _snap(self) -> SnapKV:
        mean = self.capacity - self.window
        budget, least = mean, mean // self.beta
        if self.layers > 1:
            most = 2 * mean - least
            budget = most - self.layer * ((most - least) // (self.layers - 1))
        return SnapKV(max(budget, 1) + self.window, self.window, self.kernel, self.pool, self.start)

    @property
    def least(self) -> int:
        return self._snap.least

    def init(self, spec: Spec, rows: int, key: jax.Array) -> ThinnedState:
        return self._snap.init(spec, rows, key)

    def reserve(self, spec: Spec, state: ThinnedState, tokens: int) -> ThinnedState:
        return self._snap.reserve(spec, state, tokens)

    attend = staticmethod(thinned.attend)
    extend = staticmethod(thinned.extend)
    decode = staticmethod(thinned.decode)
    kept = staticmethod(thinned.kept)

    def seal(self, spec: Spec, state: ThinnedState) -> ThinnedState:
        return self._snap.seal(spec, state)
