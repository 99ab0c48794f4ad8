"""PyramidKV (Cai et al. 2024): SnapKV with more tokens in the first layers than in the last."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import jax

from jaxkv import thinned
from jaxkv.contract import Chunk, Kept, Partial, Spec
from jaxkv.errors import UserError
from jaxkv.policies.snapkv import SnapKV
from jaxkv.thinned import ThinnedState


@dataclass(frozen=True)
class PyramidKV:
    """SnapKV whose budget falls from layer to layer, `capacity` tokens in the mean.

    beta: the last layer has 1/beta of the mean, beside the window. layer, layers: which of how many
    this is (`of_layer`). The published code gives all layers the same where a prompt is
    shorter than twice the capacity; here a budget does not depend on the prompt.
    """

    capacity: int = 1024
    window: int = 32
    kernel: int = 7
    pool: Literal["max", "mean"] = "max"
    beta: int = 20
    start: int = 512
    layer: int = field(default=0, repr=False)
    layers: int = field(default=1, repr=False)

    summary: ClassVar[str] = "snapkv with a budget that falls from layer to layer"
    source: ClassVar[str] = "PyramidKV, arXiv 2406.02069"
    formula: ClassVar[str] = SnapKV.formula
    axes: ClassVar[ThinnedState] = thinned.AXES

    def __post_init__(self) -> None:
        if self.beta < 1 or not 0 <= self.layer < self.layers:
            raise UserError(
                "beta must be at least 1 and layer below layers, got "
                f"{self.beta}, {self.layer} and {self.layers}; try beta=20"
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
    def reach(self) -> float:
        return math.inf

    @property
    def least(self) -> int:
        return self._snap.least

    def init(self, spec: Spec, rows: int, key: jax.Array) -> ThinnedState:
        return self._snap.init(spec, rows, key)

    def reserve(self, spec: Spec, state: ThinnedState, tokens: int) -> ThinnedState:
        return self._snap.reserve(spec, state, tokens)

    def attend(self, spec: Spec, state: ThinnedState, chunk: Chunk) -> Partial:
        return self._snap.attend(spec, state, chunk)

    def extend(self, spec: Spec, state: ThinnedState, chunk: Chunk) -> ThinnedState:
        return self._snap.extend(spec, state, chunk)

    def decode(self, spec: Spec, state: ThinnedState, chunk: Chunk) -> tuple[Partial, ThinnedState]:
        return self._snap.decode(spec, state, chunk)

    def kept(self, spec: Spec, state: ThinnedState) -> Kept:
        return self._snap.kept(spec, state)

    def seal(self, spec: Spec, state: ThinnedState) -> ThinnedState:
        return self._snap.seal(spec, state)
