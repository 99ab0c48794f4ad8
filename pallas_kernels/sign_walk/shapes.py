"""Shapes for the tests and `bench.py`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.pallas_kernels.sign_walk.reference import NO_STEP


class WalkBenchShape(NamedTuple):
    """`blocks` walks of `steps`; with 1 member over tokens, with 2 over differences of two."""

    blocks: int
    steps: int
    members: int
    head_dim: int


LARGEST = {  # a prompt of 131,072 tokens, 8 KV heads, in blocks of 256 tokens
    "tokens": WalkBenchShape(131_072 * 8 // 256, 256, 1, 128),
    "pairs": WalkBenchShape(131_072 * 8 // 256, 128, 2, 128),
}
PROMPT = {  # the same for 32,768 tokens
    "tokens": WalkBenchShape(32_768 * 8 // 256, 256, 1, 128),
    "pairs": WalkBenchShape(32_768 * 8 // 256, 128, 2, 128),
}
SMALL = {  # for interpreters: full and partial groups, steps that no tile divides
    "tokens": WalkBenchShape(16, 128, 1, 32),
    "pairs": WalkBenchShape(5, 64, 2, 16),
    "broken": WalkBenchShape(3, 40, 1, 24),
    "one": WalkBenchShape(1, 256, 2, 64),
    "wide": WalkBenchShape(1, 512, 1, 64),
}


def arguments(shape: WalkBenchShape) -> tuple[jax.Array, ...]:
    """keys, values, thresholds, shift and gain of `api.balance_walk`, all zero."""
    tokens = jnp.zeros((shape.blocks, shape.members, shape.steps, shape.head_dim), jnp.float32)
    scalars = jnp.zeros(shape.blocks, jnp.float32)
    return tokens, tokens, jnp.zeros((shape.blocks, shape.steps), jnp.float32), scalars, scalars


def inputs(shape: WalkBenchShape, seed: int = 0, share: float = 1.0) -> tuple[jax.Array, ...]:
    """The same arguments with random tokens; share: fraction of steps that exist.

    Keys are close enough that the walk has something to balance. Values have unit length. The gain
    leaves most steps random, but not all.
    """
    random = np.random.default_rng(seed)
    size = (shape.blocks, shape.members, shape.steps, shape.head_dim)
    keys = 0.5 * random.normal(size=size) / np.sqrt(np.sqrt(shape.head_dim))
    values = random.normal(size=size) / np.sqrt(shape.head_dim)
    thresholds = 0.5 - random.random((shape.blocks, shape.steps))
    exists = np.arange(shape.steps) < share * shape.steps
    thresholds = np.where(exists, thresholds, NO_STEP)
    shift = (keys**2).sum(-1).max((1, 2))
    gain = np.full(shape.blocks, 1.0)
    return tuple(jnp.asarray(x, jnp.float32) for x in (keys, values, thresholds, shift, gain))
