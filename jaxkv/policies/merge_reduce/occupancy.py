"""Level occupancy of the merge-and-reduce tree: filled slots and the multiplicity of their tokens.

Both are functions of `num_evicted`, the number of tokens that have left the window. It is halved
when it reaches 2^31 (HALVE_COUNT_AT in tree.py). With L levels, of t slots for the first and t/2
for the others, a token of level 0 represents 2^r tokens. r grows by one each time the stream
doubles, from t 2^(L-1) tokens on. The binary digits of the number of blocks say which levels are
filled.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import draws
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32


class TreeSize(NamedTuple):
    """levels: L. block: t, a power of two, at least 2."""

    levels: int
    block: int

    @property
    def half(self) -> int:
        return self.block // 2

    @property
    def slots(self) -> int:
        """Slots of all levels: two halves of the first, one of each other."""
        return self.half * (self.levels + 1)

    @property
    def before(self) -> int:
        """Tokens before the last level is halved for the first time."""
        return self.block << (self.levels - 1)


def log2_group_size(size: TreeSize, num_evicted: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """r: after `num_evicted` tokens, a token of level 0 represents 2^r."""
    return np.uint32(32) - jax.lax.clz(num_evicted // np.uint32(size.before))


def filled_per_level(size: TreeSize, num_evicted: UInt32[Array, "..."]) -> Int32[Array, "... L"]:
    """Filled slots of each level; for level 0 the number of groups that have begun."""
    half = np.uint32(size.half)
    r, start = group_size_and_start(size, num_evicted)
    blocks = (num_evicted >> r) // np.uint32(size.block)
    levels = range(1, size.levels)
    last = size.levels - 1
    inner = [(blocks >> np.uint32(level - 1)) & np.uint32(1) for level in levels if level < last]
    top = [jnp.minimum(blocks >> np.uint32(last - 1), np.uint32(1))] if last else []
    first = (num_evicted - start + (np.uint32(1) << r) - np.uint32(1)) >> r
    return jnp.stack([first, *(half * x for x in [*inner, *top])], axis=-1).astype(jnp.int32)


def group_size_and_start(
    size: TreeSize, num_evicted: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """r, and the number of the first token in level 0."""
    r = log2_group_size(size, num_evicted)
    start = num_evicted & ~((np.uint32(size.block) << r) - np.uint32(1))
    return r, start if size.levels > 1 else jnp.zeros_like(start)


def tokens_until_full(size: TreeSize, num_evicted: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Tokens until level 0 is full."""
    r, start = group_size_and_start(size, num_evicted)
    return start + (np.uint32(size.block) << r) - num_evicted


def token_of_slot(
    size: TreeSize, num_evicted: UInt32[Array, "B T"], rng: UInt32[Array, "B K 2"]
) -> UInt32[Array, "B K T t"]:
    """The number of the token that each slot of level 0 stores or will store."""
    r, start = (x[:, None, :, None] for x in group_size_and_start(size, num_evicted))
    first = start + (jnp.arange(size.block, dtype=jnp.uint32)[None, None, None] << r)
    flat = draws.bits(first.reshape(len(num_evicted), 1, -1), rng)
    bits = flat.reshape(*rng.shape[:2], *first.shape[2:])
    # The group's highest r bits of a draw; two shifts, for one by 32 is not defined.
    return first + ((bits >> np.uint32(1)) >> (np.uint32(31) - r))


def filled_slots(
    size: TreeSize, num_evicted: UInt32[Array, "B T"], rng: UInt32[Array, "B K 2"]
) -> Bool[Array, "B K T S"]:
    """The filled slots, level 0 first."""
    full = jnp.repeat(filled_per_level(size, num_evicted)[..., 1:] > 0, size.half, axis=2)[:, None]
    full = jnp.broadcast_to(full, (*rng.shape[:2], *full.shape[2:]))
    first = token_of_slot(size, num_evicted, rng) < num_evicted[:, None, :, None]
    return jnp.concatenate([first, full], axis=3)


def last_writes(size: TreeSize, num_evicted: int) -> tuple[int, ...]:
    """After how many evicted tokens each level but the first was last written; 0: never.

    A block that fills level 0 is merged upwards past every filled level. The lowest set bit of its
    number names the level where it ends.
    """
    return tuple(_last_write(size, num_evicted, level) for level in range(1, size.levels))


def _last_write(size: TreeSize, num_evicted: int, level: int) -> int:
    last = size.levels - 1
    for r in range((num_evicted // size.before).bit_length(), -1, -1):
        fill_tokens = size.block << r
        minimum = 2 ** (last - 1) if r else 0  # blocks that the halving before it left
        maximum = min(2**last, num_evicted // fill_tokens)
        step = 2 ** (level - 1)
        block = maximum // step * step
        if level < last and block // step % 2 == 0:
            block -= step
        if block > minimum:
            return block * fill_tokens
    return 0


def log_weights(size: TreeSize, num_evicted: UInt32[Array, "..."]) -> Float32[Array, "... S"]:
    """The log of the number of tokens that each slot's token represents."""
    level = np.maximum(np.arange(size.slots) // size.half - 1, 0).astype(np.int32)
    r = log2_group_size(size, num_evicted)[..., None].astype(jnp.int32)
    times = r + level.reshape(*[1] * num_evicted.ndim, -1)
    return times.astype(jnp.float32) * np.float32(np.log(2))


def tokens_before_half(size: TreeSize, num_evicted: UInt32[Array, "..."]) -> Int32[Array, "... P"]:
    """The number of stored tokens before each half in text order; the last level is the oldest.

    A group that has begun counts even if its token has not come yet.
    """
    full = filled_per_level(size, num_evicted)
    before = jnp.cumsum(full[..., ::-1], axis=-1)[..., ::-1] - full
    first = before[..., :1]
    return jnp.concatenate([first, first + size.half, before[..., 1:]], axis=-1)
