"""BalanceKV (Han et al. 2025) as published: a finished prompt is halved, and halved again."""

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
from jaxkv.halving import Halving, halve, walk
from jaxkv.sample import Sample
from jaxkv.thinned import Ends, ThinnedState
from jaxkv.typing import Array, Float32, Int32


@dataclass(frozen=True)
class Balance:
    """Keep the first `sinks` tokens of a prompt and its last `window`; halve the others `rounds`
    times, each kv head for itself, and keep what is generated.

    block: so many tokens are balanced against each other; what a round keeps makes the blocks of
    the next. mode: `walk` gives each token a sign, such that attention to both signs is alike, and
    keeps one sign, as the paper; `pairs` does so to pairs of neighbours, of which one stays;
    `coin` keeps one of two neighbours at random. temperature: keys' products are multiplied by it
    where tokens are balanced. c: how much of a sign is left to chance; at 0 the first alone.

    weights: `consistent`, a kept token counts for 2^rounds in the softmax; `published`, as the
    released code: the walk's halves are filled up with tokens that were not walked, which count
    for 2^rounds in the denominator and for less in the numerator. start: slots before the prompt
    comes, doubled as they fill.
    """

    sinks: int = 32
    window: int = 32
    rounds: int = 2
    block: int = 256
    mode: Literal["walk", "pairs", "coin"] = "pairs"
    temperature: float = 0.1
    c: float = 0.25
    weights: Literal["consistent", "published"] = "consistent"
    start: int = 512

    summary: ClassVar[str] = "a prompt's ends, and what lies between balanced against itself"
    source: ClassVar[str] = "BalanceKV, arXiv 2502.07861"
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
        if not 2 <= self.block <= thinned.MOST or self.block % (1 << self.rounds):
            raise UserError(
                f"block must be a multiple of 2^rounds up to {thinned.MOST}, for it is halved so "
                f"often, got block={self.block} and rounds={self.rounds}; try block=256,rounds=2"
            )
        if self.weights not in ("consistent", "published"):
            raise UserError(f"weights must be consistent or published, got {self.weights!r}")
        if self.weights == "published" and self.mode != "walk":
            raise UserError(
                f"weights=published belong to mode=walk, got mode={self.mode}; give mode=walk"
            )
        _ = self._how

    @property
    def _how(self) -> Halving:
        return Halving(self.mode, self.temperature, self.c)

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
            times = jnp.ones(tokens.positions.shape, jnp.float32)
            for number in range(self.rounds):
                tokens, times = self._round(spec, tokens, times, count, state.key, number)
                count = count // 2
            share = (times / np.float32(1 << self.rounds))[..., None]
            values = (tokens.v.astype(jnp.float32) * share).astype(tokens.v.dtype)
            tokens = tokens._replace(v=values)
            return thinned.shorten(tokens, count, self.rounds * math.log(2))

        return thinned.seal(spec, state, self._ends, choose)

    def _round(
        self, spec: Spec, tokens: Sample, times: Array, count: Array, key: Array, number: int
    ) -> tuple[Sample, Float32[Array, "B K C"]]:
        """Half of the first `count` tokens of each row, and what each counts for."""
        rows, kv_heads, size = tokens.positions.shape
        block = min(self.block, size + size % 2)
        blocks = -(-size // block)
        tokens = thinned.cut(tokens, blocks * block)
        times = jnp.pad(times, [(0, 0), (0, 0), (0, blocks * block - size)])
        split = lambda a: a.reshape(rows, kv_heads, blocks, block, *a.shape[3:])  # noqa: E731
        # A draw follows from the token's place in the prompt and the round.
        place = jnp.arange(blocks * block, dtype=jnp.uint32)[None, None]
        chances = drawn.uniforms(place * np.uint32(16) + np.uint32(number), key)
        held = jnp.clip(count[:, None] - block * jnp.arange(blocks)[None], 0, block)
        held = jnp.broadcast_to(held[:, None], (rows, kv_heads, blocks))
        given = (
            self._how,
            spec.scale,
            split(tokens.k),
            split(tokens.v.astype(jnp.float32) * times[..., None]),
        )
        if self.weights == "published":
            there = jnp.arange(block)[None, None, None] < held[..., None]
            _, signs = walk(*given, split(chances), there)
            chosen, doubled = _as_published(signs.reshape(rows, kv_heads, -1), count)
        else:
            chosen = halve(*given, split(chances), held).chosen
            first = block * jnp.arange(blocks, dtype=jnp.int32)[None, None, :, None]
            chosen, doubled = (chosen + first).reshape(rows, kv_heads, -1), np.float32(2)
        times = jnp.take_along_axis(times, chosen, axis=2)
        return drawn.pick(tokens, chosen), times * doubled


def _as_published(
    signs: Int32[Array, "B K S"], count: Int32[Array, " B"]
) -> tuple[Int32[Array, "B K C"], Float32[Array, "B K C"]]:
    """Which half the released code keeps, and how often it counts each.

    Where one sign has half of all tokens, those of the other before it count twice; those that
    come after were not balanced and count once.
    """
    half, place = (count // 2)[:, None, None], jnp.arange(signs.shape[2])[None, None]
    plus, minus = (jnp.cumsum((signs == sign).astype(jnp.int32), axis=2) for sign in (1, -1))
    full = jnp.argmax((plus >= half) | (minus >= half), axis=2)[..., None]
    rarer = jnp.where(jnp.take_along_axis(plus, full, axis=2) >= half, -1, 1)
    keep = (signs != 0) & ((place > full) | (signs == rarer))
    chosen = jnp.argsort(~keep, axis=2, stable=True)[:, :, : signs.shape[2] // 2]
    return chosen.astype(jnp.int32), jnp.where(chosen > full, np.float32(1), np.float32(2))
