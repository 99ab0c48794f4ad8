"""The shapes that tests and `bench.py` share."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.pallas_kernels.sampled_attention.reference import Angles, Weight

Array = jax.Array
SHARE = 0.02  # of the keys that a sample holds, in MagicPIG at K = 10, L = 150


class Shape(NamedTuple):
    """sample: rows there is room for, of `slots`, a query head."""

    batch: int
    heads: int
    kv_heads: int
    slots: int
    head_dim: int
    sample: int
    dtype: str = "float32"


LARGEST = Shape(1, 32, 8, 131_072, 128, 4096)
LENGTHS = 32_768, 98_304, 131_072, 262_144
SMALL = {  # for interpreters: nothing is a multiple of anything but what a TPU asks for in "tiles"
    "alone": Shape(1, 2, 2, 65, 16, 33),
    "threes": Shape(2, 6, 2, 301, 64, 157),
    "wide": Shape(1, 4, 1, 1165, 128, 700),
    "tiles": Shape(1, 4, 2, 208, 128, 150),
}


def inputs(
    shape: Shape, weight: str = "none", seed: int = 0, share: float | None = None
) -> tuple[Array, Array, Array, Array, Array, Weight]:
    """q, k, v, rows, count and weight of `sampled_attention`, of random numbers.

    weight: none, log or angles. Counts are 0, 1, all and anything between; share: of the slots,
    about so many each. Values have a mean, for an attention of size zero has no relative error.
    """
    random = np.random.default_rng(seed)
    batch, heads, kv_heads, slots, head_dim, sample, dtype = shape
    normal = lambda *size: random.standard_normal(size, np.float32)  # noqa: E731
    centre = 0.5 * normal(kv_heads, 1, head_dim)
    q = normal(batch, heads, head_dim) / np.float32(np.sqrt(head_dim))
    k = normal(batch, kv_heads, slots, head_dim) + centre
    v = 1 + normal(batch, kv_heads, slots, head_dim)
    rows = [np.sort(random.permutation(slots)[:sample]) for _ in range(batch * heads)]
    count = random.integers(0, sample + 1, batch * heads)
    count[: min(3, len(count) - 1)] = [0, 1, sample][: min(3, len(count) - 1)]
    if share is not None:
        count = random.binomial(slots, share, batch * heads).clip(0, sample)
    q, k, v = (jnp.asarray(a, dtype) for a in (q, k, v))
    given: Weight = None
    if weight == "log":
        given = jnp.asarray(3 * normal(batch, heads, sample))
    elif weight == "angles":
        group = heads // kv_heads
        shift = jnp.sum(jnp.float32(q) * np.repeat(centre[:, 0], group, 0)[None], -1)
        norms = jnp.linalg.norm(jnp.float32(k) - centre[None], axis=-1)
        given = Angles(norms, shift, jnp.linalg.norm(jnp.float32(q), axis=-1))
    rows = jnp.asarray(np.reshape(rows, (batch, heads, sample)), jnp.int32)
    return q, k, v, rows, jnp.asarray(count.reshape(batch, heads), jnp.int32), given


def structs(
    shape: Shape, weight: str = "none", sharding: jax.sharding.Sharding | None = None
) -> tuple:
    """Of what shapes and types `inputs` are."""
    batch, heads, kv_heads, slots, head_dim, sample, dtype = shape

    def struct(*size: int, of: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, of, sharding=sharding)

    cache = struct(batch, kv_heads, slots, head_dim, of=dtype)
    each = struct(batch, heads)
    given = {
        "none": None,
        "log": struct(batch, heads, sample),
        "angles": Angles(struct(batch, kv_heads, slots), each, each),
    }
    rows, count = struct(batch, heads, sample, of="int32"), struct(batch, heads, of="int32")
    return struct(batch, heads, head_dim, of=dtype), cache, cache, rows, count, given[weight]
