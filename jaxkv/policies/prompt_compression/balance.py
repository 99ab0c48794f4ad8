"""BalanceKV (Han et al. 2025) as published: a finished prompt is halved, and halved again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jaxkv import draws, rows
from jaxkv.cache import per_head
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Spec
from jaxkv.errors import UserError, check_choice
from jaxkv.pallas_kernels import import_pallas
from jaxkv.policies.discrepancy import Halving, halve, walk
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import CompressedState, CompressionPolicy, ExactEnds
from jaxkv.rows import Storage
from jaxkv.typing import Array, Float32, Int32


@dataclass(frozen=True)
class Balance(CompressionPolicy):
    """Keep a prompt's first `sinks` tokens and its last `window`; halve the others `rounds` times.

    A self-balancing walk splits a block of tokens into two halves that give almost the same
    attention output to every query, because it keeps the signed sum of their vectors small (section
    3). One half, counted twice, then replaces the block with a lower error than a random sample.

    Each KV head halves its own tokens. Generated tokens are cached exactly. block: number of tokens
    that are balanced against each other; the tokens that a round keeps form the blocks of the next
    round. mode: `walk` gives each token a sign and keeps the tokens of one sign, as in the paper;
    `pairs` gives a sign to each pair of neighbours, which decides which of the two stays; `coin`
    keeps one of two neighbours at random. key_scale: multiplies the inner products of keys
    during balancing. c: how random the signs are; with 0 only the first sign is random.

    weights: with `consistent`, a kept token counts 2^rounds times in the softmax. `published`
    follows the released code: it fills a half with the tokens after the point where one sign has
    half of all, whatever their signs. These count 2^rounds times in the denominator and fewer times
    in the numerator. start: slots before the prompt, doubled as they fill. storage: as in
    streaming.
    """

    sinks: int = 32
    window: int = 32
    rounds: int = 2
    block: int = 256
    mode: Literal["walk", "pairs", "coin"] = "pairs"
    key_scale: float = 0.1
    c: float = 0.25
    weights: Literal["consistent", "published"] = "consistent"
    start: int = 512
    storage: Storage = "float"

    summary: ClassVar[str] = "a prompt's first and last tokens, and a balanced sample of the others"
    source: ClassVar[str] = "BalanceKV, arXiv 2502.07861"

    def __post_init__(self) -> None:
        import_pallas()
        base.check_rounds(self.rounds)
        base.check_ends(self.ends, self.start)
        super().__post_init__()
        if not 2 <= self.block <= rows.MAX_SLOTS or self.block % (1 << self.rounds):
            raise UserError(
                f"block must be a multiple of 2^rounds up to {rows.MAX_SLOTS}, because each round "
                f"halves it, got block={self.block} and rounds={self.rounds}; try "
                "block=256,rounds=2"
            )
        check_choice("weights", self.weights, ("consistent", "published"))
        if self.weights == "published" and self.mode != "walk":
            raise UserError(
                f"weights=published belong to mode=walk, got mode={self.mode}; give mode=walk"
            )
        _ = self._halving

    @property
    def _halving(self) -> Halving:
        return Halving(self.mode, self.key_scale, self.c)

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(self.sinks, self.window, 1 << self.rounds)

    def choose(
        self, spec: Spec, state: CompressedState, tokens: PerHeadTokens, count: Array
    ) -> base.Chosen:
        multiplicity = jnp.ones(tokens.positions.shape, jnp.float32)
        for round_index in range(self.rounds):
            tokens, multiplicity = self._round(
                spec, tokens, multiplicity, count, state.rng, round_index
            )
            count = count // 2
        share = (multiplicity / np.float32(1 << self.rounds))[..., None]
        tokens = tokens._replace(v=rows.times(tokens.v, share))
        return base.weighted_sample(tokens, count, self.rounds * math.log(2))

    def _round(
        self,
        spec: Spec,
        tokens: PerHeadTokens,
        multiplicity: Array,
        count: Array,
        rng: Array,
        round_index: int,
    ) -> tuple[PerHeadTokens, Float32[Array, "B K C"]]:
        """Half of the first `count` tokens of each sequence, and the multiplicity of each."""
        batch, kv_heads, size = tokens.positions.shape
        block = min(self.block, size + size % 2)
        blocks = -(-size // block)
        tokens = base.resize(tokens, blocks * block)
        multiplicity = jnp.pad(multiplicity, [(0, 0), (0, 0), (0, blocks * block - size)])
        split = lambda a: a.reshape(batch, kv_heads, blocks, block, *a.shape[3:])
        # A draw follows from the token's place in the prompt and the round.
        place = jnp.arange(blocks * block, dtype=jnp.uint32)[None, None]
        uniforms = draws.uniforms(place * np.uint32(16) + np.uint32(round_index), rng)
        members = jnp.clip(count[:, None] - block * jnp.arange(blocks)[None], 0, block)
        members = jnp.broadcast_to(members[:, None], (batch, kv_heads, blocks))
        arguments = (
            self._halving,
            spec.scale,
            split(rows.dequantise(tokens.k)),
            split(rows.dequantise(tokens.v).astype(jnp.float32) * multiplicity[..., None]),
        )
        if self.weights == "published":
            valid = jnp.arange(block)[None, None, None] < members[..., None]
            _, signs = walk(*arguments, split(uniforms), valid)
            chosen, doubled = _as_published(signs.reshape(batch, kv_heads, -1), count)
        else:
            chosen = halve(*arguments, split(uniforms), members).chosen
            first = block * jnp.arange(blocks, dtype=jnp.int32)[None, None, :, None]
            chosen, doubled = (chosen + first).reshape(batch, kv_heads, -1), np.float32(2)
        multiplicity = jnp.take_along_axis(multiplicity, chosen, axis=2)
        return per_head.pick(tokens, chosen), multiplicity * doubled


def _as_published(
    signs: Int32[Array, "B K S"], count: Int32[Array, " B"]
) -> tuple[Int32[Array, "B K C"], Float32[Array, "B K C"]]:
    """The half that the released code keeps, and the multiplicity of each of its tokens.

    Once one sign has half of all tokens, the tokens of the other sign before it count twice. The
    tokens after it are kept whatever their signs, and count once.
    """
    half, place = (count // 2)[:, None, None], jnp.arange(signs.shape[2])[None, None]
    plus, minus = (jnp.cumsum((signs == sign).astype(jnp.int32), axis=2) for sign in (1, -1))
    full = jnp.argmax((plus >= half) | (minus >= half), axis=2)[..., None]
    rarer = jnp.where(jnp.take_along_axis(plus, full, axis=2) >= half, -1, 1)
    keep = (signs != 0) & ((place > full) | (signs == rarer))
    chosen = jnp.argsort(~keep, axis=2, stable=True)[:, :, : signs.shape[2] // 2]
    return chosen.astype(jnp.int32), jnp.where(chosen > full, np.float32(1), np.float32(2))
