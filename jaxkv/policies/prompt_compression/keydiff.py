"""KeyDiff (Park et al. 2025): the tokens of a finished prompt whose keys are least alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxkv import rows
from jaxkv.cache import per_head
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.cache.ring import Ring
from jaxkv.contract import Spec
from jaxkv.errors import check_choice
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import (
    Budgets,
    CompressedState,
    CompressionPolicy,
    ExactEnds,
)
from jaxkv.rows import Storage
from jaxkv.typing import Array, Float, Float32

Keys = Literal["rotated", "unrotated"]


@dataclass(frozen=True)
class KeyDiff(CompressionPolicy):
    """Keep the `capacity` tokens of a prompt whose keys differ most from the mean key of the head.

    Keys that point away from the others tend to receive more attention, and a set of such keys
    covers more directions (section 3). The score needs no query, so it does not depend on what is
    asked later.

    The score is minus the cosine of a key with the mean of all keys of the prompt, each divided by
    its length. Keys are compared as they are cached, rotated to their positions. The paper's
    algorithm evicts block by block while it reads the prompt; here the whole prompt is scored once.
    Generated tokens are cached exactly. A prompt of at most `capacity` tokens is not compressed.

    keys: rotated, as in the paper, or unrotated, as they were before their rotation. budgets: equal
    for `capacity` tokens in each KV head; adaptive for as many in all heads of a layer together
    (AdaKV, arXiv 2407.11550). start: slots before the prompt, doubled as they fill. storage: as in
    streaming.
    """

    capacity: int = 1024
    keys: Keys = "rotated"
    budgets: Budgets = "equal"
    start: int = 512
    storage: Storage = "float"

    summary: ClassVar[str] = "the tokens of a prompt whose keys are least alike"
    source: ClassVar[str] = "KeyDiff, arXiv 2504.15364"
    ends: ClassVar[ExactEnds] = ExactEnds(0, 0)

    def __post_init__(self) -> None:
        base.check_capacity(self.capacity, 1, self.start)
        check_choice("keys", self.keys, ("rotated", "unrotated"))
        super().__post_init__()

    @property
    def min_prompt(self) -> int:
        return self.capacity + 1

    def choose(
        self, spec: Spec, state: CompressedState, tokens: PerHeadTokens, count: Array
    ) -> base.Chosen:
        difference = score(spec, state.dense, self.keys)
        return base.keep_best(tokens, count, difference, self.capacity, self.budgets)


def score(spec: Spec, prompt: Ring, keys: Keys) -> Float32[Array, "B K S"]:
    """Minus the cosine of each key of a prompt with the mean of all its keys of length 1.

    A score chooses, so it has no gradient.
    """
    batch, kv_heads, size, _ = prompt.k.shape
    k = jax.lax.stop_gradient(rows.dequantise(prompt.k).astype(jnp.float32))
    if keys == "unrotated":
        back = jnp.broadcast_to(-prompt.positions[:, None], (batch, kv_heads, size))
        k = per_head.rerotate(replace(spec, dtype="float32"), k, back)
    k = _unit(k)
    written = (jnp.arange(size)[None] < prompt.count[:, None])[:, None, :, None]
    mean = jnp.sum(jnp.where(written, k, 0.0), axis=2, keepdims=True)
    return -jnp.sum(k * _unit(mean), axis=-1)


def _unit(x: Float[Array, "B K S H"]) -> Float[Array, "B K S H"]:
    """Vectors of length 1; a zero vector stays zero."""
    length = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.where(length == 0, 1.0, length)
