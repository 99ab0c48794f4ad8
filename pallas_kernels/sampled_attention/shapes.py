"""Shapes for the tests and `bench.py`."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.pallas_kernels.sampled_attention.reference import Angles, Weight

SAMPLED = 0.02  # the fraction of keys in a sample, in MagicPIG at K = 10, L = 150


class AttentionBenchShape(NamedTuple):
    """sample: the capacity of a sample per query head."""

    batch: int
    heads: int
    kv_heads: int
    slots: int
    head_dim: int
    sample: int
    dtype: str = "float32"


LARGEST = AttentionBenchShape(1, 32, 8, 131_072, 128, 4096)
LENGTHS = 32_768, 98_304, 131_072, 262_144
SMALL = {  # for interpreters: odd sizes; "tiles" has the multiples that a TPU needs
    "alone": AttentionBenchShape(1, 2, 2, 65, 16, 33),
    "threes": AttentionBenchShape(2, 6, 2, 301, 64, 157),
    "wide": AttentionBenchShape(1, 4, 1, 1165, 128, 700),
    "tiles": AttentionBenchShape(1, 4, 2, 208, 128, 150),
}


def inputs(
    shape: AttentionBenchShape, weight: str = "none", seed: int = 0, fraction: float | None = None
) -> tuple[Array, Array, Array, Array, Array, Weight]:
    """Random q, k, v, slots, count and weight of `sampled_attention`.

    weight: none, log or angles. fraction: about this fraction of slots is in each sample; None:
    counts of 0, 1, all, and random ones. Values have a mean, because outputs near zero would have
    no meaningful relative error.
    """
    random = np.random.default_rng(seed)
    batch, heads, kv_heads, slots, head_dim, sample, dtype = shape
    normal = lambda *size: random.standard_normal(size, np.float32)
    centre = 0.5 * normal(kv_heads, 1, head_dim)
    q = normal(batch, heads, head_dim) / np.float32(np.sqrt(head_dim))
    k = normal(batch, kv_heads, slots, head_dim) + centre
    v = 1 + normal(batch, kv_heads, slots, head_dim)
    chosen = [np.sort(random.permutation(slots)[:sample]) for _ in range(batch * heads)]
    count = random.integers(0, sample + 1, batch * heads)
    count[: min(3, len(count) - 1)] = [0, 1, sample][: min(3, len(count) - 1)]
    if fraction is not None:
        count = random.binomial(slots, fraction, batch * heads).clip(0, sample)
    q, k, v = (jnp.asarray(a, dtype) for a in (q, k, v))
    weights: Weight = None
    if weight == "log":
        weights = jnp.asarray(3 * normal(batch, heads, sample))
    elif weight == "angles":
        group = heads // kv_heads
        shift = jnp.sum(jnp.float32(q) * np.repeat(centre[:, 0], group, 0)[None], -1)
        norms = jnp.linalg.norm(jnp.float32(k) - centre[None], axis=-1)
        weights = Angles(norms, shift, jnp.linalg.norm(jnp.float32(q), axis=-1))
    chosen = jnp.asarray(np.reshape(chosen, (batch, heads, sample)), jnp.int32)
    return q, k, v, chosen, jnp.asarray(count.reshape(batch, heads), jnp.int32), weights
