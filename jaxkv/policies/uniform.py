"""A uniform sample of a finished prompt: what BalanceKV (Han et al. 2025) is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import sample as drawn
from jaxkv import thinned
from jaxkv.contract import Spec
from jaxkv.sample import Sample
from jaxkv.thinned import Ends, ThinnedState
from jaxkv.typing import Array, Float32


@dataclass(frozen=True)
class Uniform:
    """Keep the first `sinks` tokens of a prompt and its last `window`; of the others one in
    2^rounds, drawn without replacement by each kv head for itself, and keep what is generated.

    weighted: a sampled token counts for 2^rounds in the softmax, as in BalanceKV. start: as in
    balance.
    """

    sinks: int = 32
    window: int = 32
    rounds: int = 2
    weighted: bool = True
    start: int = 512

    summary: ClassVar[str] = "a prompt's ends, and a random sample of what lies between"
    source: ClassVar[str] = "the baseline of BalanceKV, arXiv 2502.07861"
    formula: ClassVar[str] = (
        "start * (2 * K * H * itemsize + 4) + 4 + 8 * K, doubling, until the prompt is sealed; then"
        " a quarter of it at rounds=2, and all that is generated"
    )
    axes: ClassVar[ThinnedState] = thinned.AXES
    shared: ClassVar[tuple[str, ...]] = thinned.SHARED
    appends: ClassVar[tuple[str, ...]] = thinned.APPENDS
    reach: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        thinned.check_rounds(self.rounds)
        thinned.check(self._ends, self.start)

    @property
    def _ends(self) -> Ends:
        return Ends(self.sinks, self.window, 1 << self.rounds)

    @property
    def least(self) -> int:
        return self._ends.most + 1

    def init(self, spec: Spec, rows: int, key: jax.Array) -> ThinnedState:
        return thinned.init(spec, rows, key, self.start)

    def reserve(self, spec: Spec, state: ThinnedState, tokens: int) -> ThinnedState:
        return thinned.reserve(spec, state, tokens, self._ends)

    attend = staticmethod(thinned.attend)
    extend = staticmethod(thinned.extend)
    decode = staticmethod(thinned.decode)
    kept = staticmethod(thinned.kept)

    def seal(self, spec: Spec, state: ThinnedState) -> ThinnedState:
        def choose(tokens: Sample, count: Array) -> tuple[Sample, Float32[Array, "B K C"]]:
            size = tokens.positions.shape[2]
            place = jnp.arange(size, dtype=jnp.uint32)[None, None]
            draws = drawn.draws(place, state.key)
            draws = jnp.where(
                place.astype(jnp.int32) < count[:, None, None], draws, np.uint32(2**32 - 1)
            )
            chosen = jnp.argsort(draws, axis=2)[:, :, : -(-size >> self.rounds)]
            taken = drawn.pick(tokens, chosen.astype(jnp.int32))
            weight = self.rounds * math.log(2) if self.weighted else 0.0
            return thinned.shorten(taken, count >> self.rounds, weight)

        return thinned.seal(spec, state, self._ends, choose)
