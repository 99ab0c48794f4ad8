"""KeyDiff (Park et al. 2025): the tokens of a finished prompt whose keys are least alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxkv import rows
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Spec
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import CompressedState, CompressionPolicy, ExactEnds
from jaxkv.rows import Storage
from jaxkv.typing import Array, Float


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
    start: slots before the prompt, doubled as they fill. storage: as in streaming.
    """

    capacity: int = 1024
    start: int = 512
    storage: Storage = "float"

    summary: ClassVar[str] = "the tokens of a prompt whose keys are least alike"
    source: ClassVar[str] = "KeyDiff, arXiv 2504.15364"
    ends: ClassVar[ExactEnds] = ExactEnds(0, 0)

    def __post_init__(self) -> None:
        base.check_capacity(self.capacity, 1, self.start)
        super().__post_init__()

    @property
    def min_prompt(self) -> int:
        return self.capacity + 1

    def choose(
        self, spec: Spec, state: CompressedState, tokens: PerHeadTokens, count: Array
    ) -> base.Chosen:
        valid = jnp.arange(tokens.positions.shape[2])[None] < count[:, None]
        # A choice has no gradient.
        keys = jax.lax.stop_gradient(_unit(rows.dequantise(tokens.k).astype(jnp.float32)))
        mean = jnp.sum(jnp.where(valid[:, None, :, None], keys, 0.0), axis=2, keepdims=True)
        similarity = jnp.sum(keys * _unit(mean), axis=-1)
        return base.keep_best(tokens, count, -similarity, self.capacity)


def _unit(x: Float[Array, "B K S H"]) -> Float[Array, "B K S H"]:
    """Vectors of length 1; a zero vector stays zero."""
    length = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.where(length == 0, 1.0, length)
