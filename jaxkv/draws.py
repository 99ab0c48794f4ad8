"""Random draws of policies: functions of a sequence's seed and of a number, such as a position.

A draw depends neither on chunking, nor on other sequences of the batch, nor on devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Spec
from jaxkv.errors import UserError
from jaxkv.typing import Array, UInt32

GOLDEN = np.uint32(0x9E3779B1)  # 2^32 / golden ratio: its multiples are far apart


def seeds(rng: jax.Array, spec: Spec, batch: int) -> UInt32[Array, "B K 2"]:
    """The seeds of all draws, one per sequence and KV head.

    Raises UserError where rng is no key of JAX.
    """
    dtype = getattr(rng, "dtype", np.dtype(object))
    if not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32):
        raise UserError(f"rng must be a key of JAX, got {rng!r:.40}; give jax.random.key(0)")
    return jax.random.bits(rng, (batch, spec.kv_heads, 2), jnp.uint32)


def bits(numbers: UInt32[Array, "#B ... S"], rng: UInt32[Array, "B K 2"]) -> Array:
    """32 random bits per number: two rounds of a one-to-one integer hash, so without ties.

    A draw depends on a seed and a number alone, such as the position of a token.
    """
    return _mix(_mix(numbers + rng[:, :, :1]) ^ rng[:, :, 1:])


def uniforms(numbers: UInt32[Array, "#B ... S"], rng: UInt32[Array, "B K 2"]) -> Array:
    """The same draws, as float32 in [0, 1)."""
    return (bits(numbers, rng) >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def _mix(x: UInt32[Array, "B K S"]) -> UInt32[Array, "B K S"]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))
