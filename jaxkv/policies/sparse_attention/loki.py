"""Loki (Singhania et al. 2024): keys ranked in their first principal components."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.cache.ring import Ring
from jaxkv.contract import Leaf, Spec
from jaxkv.errors import check_choice
from jaxkv.policies.sparse_attention import base
from jaxkv.policies.sparse_attention.base import Candidates, Select, SparsePolicy
from jaxkv.typing import Array, Float32, Int32, UInt32

HIGHEST = jax.lax.Precision.HIGHEST
NO_VARIANCE = 1e-5  # of the largest: the rest is rounding


class LokiState(NamedTuple):
    """A SparseState, and the principal components of the prompt's keys.

    C is 0 until the end of prefill.
    """

    dense: Ring
    finished: Int32[Array, "B X 0"]
    rng: UInt32[Array, "B K 2"]
    components: Float32[Array, "B K H C"]

    @property
    def prompt_slots(self) -> int:
        return self.finished.shape[1]


@dataclass(frozen=True)
class Loki(SparsePolicy):
    """Attend to the keys with the largest logits in the first principal components of the keys.

    The authors observe that the keys of a head lie near a subspace of few dimensions. So their
    first principal components rank them almost as all dimensions do. A method that reads only these
    reads fewer bytes.

    Attention within the prompt is exact. After it, each query head ranks keys by their products
    with the query in that subspace. It attends exactly to the first `sinks` tokens, the newest
    `window`, and of the others to the `share` with the largest products, rounded up. The published
    method has neither sinks nor window. The defaults, a quarter of the tokens and of the
    dimensions, are one of its settings. Products have no distance penalty (ALiBi) and no cap.

    dimensions: the share of the head's dimensions, at least one, that the subspace has. Its
    components are eigenvectors of the covariance of the prompt's keys, per KV head; the published
    method finds them once on a calibration text. keys: those whose covariance is taken,
    rotated or unrotated; both variants rank rotated keys. Every token stays cached, and every key
    is projected for every query. start: slots before the prompt, doubled as they fill.
    """

    share: float = 0.25
    dimensions: float = 0.25
    keys: Literal["rotated", "unrotated"] = "rotated"
    sinks: int = 4
    window: int = 64
    start: int = 512

    summary: ClassVar[str] = (
        "every token; a query attends to sinks, window and the best keys in few dimensions"
    )
    source: ClassVar[str] = "Loki, arXiv 2406.02542"
    leaves: ClassVar[LokiState] = LokiState(*base.LEAVES, Leaf("B K H C"))

    def __post_init__(self) -> None:
        base.check_share("share", self.share, 0.25)
        base.check_share("dimensions", self.dimensions, 0.25)
        check_choice("keys", self.keys, ("rotated", "unrotated"))
        super().__post_init__()

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> LokiState:
        state = super().init(spec, batch, rng)
        empty = jnp.zeros((batch, spec.kv_heads, spec.head_dim, 0), jnp.float32)
        return LokiState(*state, empty)

    def selection(self, state: LokiState) -> Select:
        return partial(self.select_in, state.components)

    def finish_prefill(self, spec: Spec, state: LokiState) -> LokiState:
        finished = super().finish_prefill(spec, state)
        components = principal_components(spec, state.dense, self.keys)
        count = max(1, round(self.dimensions * spec.head_dim))
        return finished._replace(components=components[..., :count])

    def select_in(
        self, components: Float32[Array, "B K H C"], candidates: Candidates
    ) -> Float32[Array, "B K G T S"]:
        """The log weights of the keys with the largest products in these components."""
        batch, kv_heads, group, queries, _ = candidates.logits.shape
        q, k = jax.lax.stop_gradient((candidates.q, candidates.k))
        q = q.astype(jnp.float32).reshape(batch, queries, kv_heads, group, -1)
        q = jnp.einsum("btkgh,bkhc->bkgtc", q, components, precision=HIGHEST)
        k = jnp.einsum("bksh,bkhc->bksc", k.astype(jnp.float32), components, precision=HIGHEST)
        score = jnp.einsum("bkgtc,bksc->bkgts", q, k, precision=HIGHEST)
        count = base.share_of(self.share, candidates.selectable)
        return base.unweighted(base.largest(score, candidates.selectable, count))


def principal_components(
    spec: Spec, prompt: Ring, keys: Literal["rotated", "unrotated"]
) -> Float32[Array, "B K H H"]:
    """The eigenvectors of the covariance of the keys, largest eigenvalue first, in columns.

    The largest element of each is positive. Components without variance are 0: a prompt with fewer
    tokens than dimensions does not determine them.
    """
    k = jax.lax.stop_gradient(prompt.k).astype(jnp.float32).transpose(0, 2, 1, 3)
    if keys == "unrotated":
        k = spec.encoding.rerotate(k, -prompt.positions)
    written = (jnp.arange(k.shape[1])[None] < prompt.count[:, None])[:, :, None, None]
    count = jnp.maximum(prompt.count, 1).astype(jnp.float32)[:, None, None, None]
    mean = jnp.sum(jnp.where(written, k, 0.0), axis=1, keepdims=True) / count
    centred = jnp.where(written, k - mean, 0.0)
    covariance = jnp.einsum("bskh,bskj->bkhj", centred, centred, precision=HIGHEST) / count
    variance, vectors = jnp.linalg.eigh(covariance)  # the smallest variance first
    variance, vectors = variance[..., None, ::-1], vectors[..., ::-1]
    vectors = jnp.where(variance > NO_VARIANCE * variance[..., :1], vectors, 0.0)
    largest = jnp.argmax(jnp.abs(vectors), axis=2, keepdims=True)
    return vectors * jnp.where(jnp.take_along_axis(vectors, largest, axis=2) < 0, -1.0, 1.0)
