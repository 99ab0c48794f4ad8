"""Sparse-attention methods at matched budgets: all read an equal share of a long cache.

The share is of the keys between the first tokens and the newest, which all methods read. Most take
it as a setting. MagicPIG's share follows from K, L and the angles between queries and keys: K is
that of its Table 8, and L is computed from the angles on one text. Top-p's share follows from its
mass, which is chosen on one text too. On another text the share is then measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Chunk, Policy, Spec
from jaxkv.driver import step
from jaxkv.evals.magicpig.inclusion import u
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Decoder, Weights
from jaxkv.policies import MagicPIG, Oracle, Quest, TopK, TopP, VAttention
from jaxkv.policies.magicpig import index
from jaxkv.policies.magicpig import policy as magicpig
from jaxkv.policies.magicpig.lsh import MOST_TABLES
from jaxkv.policies.sparse_attention import base as sparse_attention
from jaxkv.policies.sparse_attention.base import Candidates, SparsePolicy
from jaxkv.typing import Array, Float32, Int32, UInt32

PAGE = 4  # keys per page of Quest; with 16, a page of a short prompt exceeds the smallest share
ROOM = 128  # unindexed tokens after a prompt
_BINS = 4000
Seen = Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]  # q, k, v [T,*,H] of every layer


@dataclass(frozen=True)
class EndsOnly(SparsePolicy):
    """Attend to the first and the newest tokens of a prompt, and to none between."""

    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = "the first tokens of a prompt and the newest"
    source: ClassVar[str] = "the baseline of methods that read a share of the keys"

    def select(self, scores: Candidates) -> Float32[Array, "B K G T S"]:
        """Select no key between the ends."""
        return sparse_attention.unweighted(jnp.zeros_like(scores.logits, bool))


DRAWING = ("magicpig", "oracle", "vattention", "uniform")  # from the seed of a stream


def methods(
    share: float, tables: tuple[int, int], sinks: int, window: int, mass: float | None = None
) -> dict[str, Policy]:
    """Every method at one share; tables: K and L; mass: that of top-p, left out without it."""
    ends = {"sinks": sinks, "window": window}
    best = share / 2
    # With these bounds no query draws more than the set share.
    fixed = {"epsilon": 0.99, "delta": 0.99, "sides": "one"}
    return {
        "magicpig": MagicPIG(*tables, **ends, tail=ROOM),
        "topk": TopK(share, **ends),
        **({} if mass is None else {"topp": TopP(mass, **ends)}),
        "oracle": Oracle(share, **ends),
        "quest": Quest(share, page=PAGE, fewest=1, **ends),
        "vattention": VAttention(best, (share - best) / (1 - best), **fixed, **ends),
        # Without top keys and without a bound it draws this share uniformly.
        "uniform": VAttention(0.0, share, **fixed, **ends),
    }


class CosineHistogram(NamedTuple):
    """A histogram of the cosines of queries and the centred keys between the ends."""

    cosine: np.ndarray
    share: np.ndarray

    def attended(self, bits: int, tables: int) -> float:
        """The expected share of the keys that is selected."""
        return float(np.sum(self.share * u(self.cosine, bits, tables)))


class Masses(NamedTuple):
    """The mean share of the keys between the ends that reaches a mass of their weight."""

    mass: np.ndarray
    share: np.ndarray

    def reaching(self, share: float) -> float:
        """The mass that needs this share on average, to four digits."""
        return round(float(np.interp(share, self.share, self.mass)), 4)


def masses(
    spec: Spec, stretches: Iterable[Seen], prompt: int, sinks: int, window: int, every: int = 1
) -> Masses:
    """Top-p's share by mass, over queries after the prompt, heads and layers.

    every: only every so-many-th query.
    """
    grid, key_shares = np.linspace(0, 1, _BINS + 1)[1:-1], []
    for seen in stretches:
        for q, k, _ in seen:
            at = jnp.arange(len(q), dtype=jnp.uint32)[None]
            q, k = (np.asarray(spec.encoding.rotate(jnp.asarray(a)[None], at))[0] for a in (q, k))
            q = q.reshape(len(q), spec.kv_heads, -1, spec.head_dim)
            for number in range(prompt, len(q), every):
                between = k[sinks : number - window + 1]
                logits = np.einsum("kgh,skh->kgs", q[number], between) * spec.scale
                weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
                weights = -np.sort(-weights.reshape(-1, len(between)).astype(np.float64))
                held = weights.cumsum(axis=-1) / weights.sum(axis=-1, keepdims=True)
                counts = [1 + np.searchsorted(head_mass, grid) for head_mass in held]
                key_shares.append(np.mean(counts, axis=0) / len(between))
    return Masses(grid, np.mean(key_shares, axis=0))


def angles(
    spec: Spec, stretches: Iterable[Seen], prompt: int, sinks: int, window: int, every: int = 1
) -> CosineHistogram:
    """Cosines of queries after the prompt with the keys between its ends, in all layers.

    every: only every so-many-th query.
    """
    edges, histogram = np.linspace(-1, 1, _BINS + 1), np.zeros(_BINS)
    for seen in stretches:
        for q, k, _ in seen:
            at = jnp.arange(len(q), dtype=jnp.uint32)[None]
            q, k = (np.asarray(spec.encoding.rotate(jnp.asarray(a)[None], at))[0] for a in (q, k))
            k = k - k[sinks : prompt - window].mean(axis=0)
            q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
            q = q.reshape(len(q), spec.kv_heads, -1, spec.head_dim)
            for number in range(prompt, len(q), every):
                between = k[sinks : number - window + 1]
                cosine = np.einsum("kgh,skh->kgs", q[number], between).clip(-1, 1)
                histogram += np.histogram(cosine, edges)[0] / cosine.size
    return CosineHistogram((edges[1:] + edges[:-1]) / 2, histogram / histogram.sum())


def tables(histogram: CosineHistogram, share: float) -> tuple[int, int]:
    """K, and the L whose expected share is nearest to `share`.

    In Table 8 one bit less selects 2.5 times as many keys, so K is 10 at 2 %, 9 at 5 %, 7 at 20 %.
    """
    bits = min(12, max(4, round(10 - math.log2(share / 0.02))))
    low, high = 2, MOST_TABLES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if histogram.attended(bits, middle) < share else (low, middle)
    return bits, min((low, high), key=lambda count: abs(histogram.attended(bits, count) - share))


def attended_share(
    chosen: Policy, spec: Spec, state: Any, asking: Chunk, last: int | Array
) -> Float32[Array, ""]:
    """The share of the keys between that the queries attend to; last: number of the first query."""
    if isinstance(chosen, MagicPIG):
        return jnp.mean(attended_by_tables(chosen, spec, state, asking, last))
    shares = []

    def choose(scores: Candidates) -> Array:
        weight = chosen.selection(state)(scores)
        selectable = jnp.sum(scores.selectable, axis=-1)
        shares.append(jnp.mean(jnp.sum(weight > -jnp.inf, axis=-1) / selectable))
        return weight

    sparse_attention.attend_selected(spec, state, asking, chosen.sinks, chosen.window, choose)
    return shares[0]


def attended_by_tables(
    chosen: MagicPIG, spec: Spec, state: index.IndexState, asking: Chunk, last: int | Array
) -> Float32[Array, "T 1 N"]:
    """The share of the keys between that is attended to; last: number of the first query."""
    state = index.append(spec, state, asking, chosen.settings)
    q = spec.encoding.rotate(asking.q, asking.positions)
    numbers = last + jnp.arange(q.shape[1], dtype=jnp.int32)

    def query_share(query: Any) -> Array:
        q, position, number = query
        selected = magicpig.find(state, chosen.settings, chosen.budget, q, number[None], position)
        return selected.count / (number + 1 - chosen.sinks - chosen.window)

    return jax.lax.map(query_share, (jnp.moveaxis(q, 1, 0), asking.positions.T, numbers))


@partial(jax.jit, static_argnums=(0, 1))
def attended_shares(
    config: Config, policies: tuple[Policy, ...], weights: Weights, states: Any,
    token: Int32[Array, "1 1"], position: UInt32[Array, "1 1"], number: Int32[Array, ""],
) -> Float32[Array, " L"]:  # fmt: skip
    """The share of the keys between the ends that one token attends to, by layer."""

    def watch(policy: Policy, spec: Spec, state: Any, *new: Array) -> tuple[Array, Array]:
        out, _ = step(policy, spec, state, *new)
        return out, attended_share(policy, spec, state, Chunk(*new[:5]), number)

    decoder = Decoder(config, weights, attention_fn=watch)
    return jnp.stack(decoder(token, position, jnp.ones((1, 1), bool), policies, states)[1])
