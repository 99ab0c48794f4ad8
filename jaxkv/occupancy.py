"""Which slots of merge_reduce's levels are taken, and what their tokens stand for.

Both follow from `middle`: how many tokens have left the window, folded after 2^31 of them (LAST in
merge_reduce.py). With L levels, of t slots the first and t/2 the others, a token of level 0 stands
for 2^r; r grows by one as the stream doubles, from t 2^(L-1) tokens on. How full the levels are is
then the binary law.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.sample import draws
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32


class Shape(NamedTuple):
    """levels: L. block: t, a power of two, and two at least."""

    levels: int
    block: int

    @property
    def half(self) -> int:
        return self.block // 2

    @property
    def slots(self) -> int:
        """Of all levels: two halves of the first, one of each other."""
        return self.half * (self.levels + 1)

    @property
    def before(self) -> int:
        """Tokens until the last level is halved for the first time."""
        return self.block << (self.levels - 1)


def raised(shape: Shape, middle: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """r, once `middle` tokens came: a token of level 0 stands for 2^r."""
    return np.uint32(32) - jax.lax.clz(middle // np.uint32(shape.before))


def fills(shape: Shape, middle: UInt32[Array, "..."]) -> Int32[Array, "... L"]:
    """How many slots of each level are taken; of level 0, how many groups have begun."""
    half = np.uint32(shape.half)
    r, begun = first_group(shape, middle)
    batches = (middle >> r) // np.uint32(shape.block)
    levels = range(1, shape.levels)
    last = shape.levels - 1
    inner = [(batches >> np.uint32(level - 1)) & np.uint32(1) for level in levels if level < last]
    top = [jnp.minimum(batches >> np.uint32(last - 1), np.uint32(1))] if last else []
    first = (middle - begun + (np.uint32(1) << r) - np.uint32(1)) >> r
    return jnp.stack([first, *(half * x for x in [*inner, *top])], axis=-1).astype(jnp.int32)


def first_group(
    shape: Shape, middle: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """r, and the number of the token with which level 0 began."""
    r = raised(shape, middle)
    begun = middle & ~((np.uint32(shape.block) << r) - np.uint32(1))
    return r, begun if shape.levels > 1 else jnp.zeros_like(begun)


def tokens_until_full(shape: Shape, middle: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """How many tokens come until level 0 is full."""
    r, begun = first_group(shape, middle)
    return begun + (np.uint32(shape.block) << r) - middle


def chosen_of(
    shape: Shape, middle: UInt32[Array, "B T"], key: UInt32[Array, "B K 2"]
) -> UInt32[Array, "B K T t"]:
    """The number of the token that each slot of level 0 holds or will hold."""
    r, begun = (x[:, None, :, None] for x in first_group(shape, middle))
    first = begun + (jnp.arange(shape.block, dtype=jnp.uint32)[None, None, None] << r)
    flat = draws(first.reshape(len(middle), 1, -1), key)
    bits = flat.reshape(*key.shape[:2], *first.shape[2:])
    # The group's highest r bits of a draw; two shifts, for one by 32 is not defined.
    return first + ((bits >> np.uint32(1)) >> (np.uint32(31) - r))


def held(
    shape: Shape, middle: UInt32[Array, "B T"], key: UInt32[Array, "B K 2"]
) -> Bool[Array, "B K T S"]:
    """Which slots hold a token, level 0 first."""
    full = jnp.repeat(fills(shape, middle)[..., 1:] > 0, shape.half, axis=2)[:, None]
    full = jnp.broadcast_to(full, (*key.shape[:2], *full.shape[2:]))
    first = chosen_of(shape, middle, key) < middle[:, None, :, None]
    return jnp.concatenate([first, full], axis=3)


def settled(shape: Shape, middle: int) -> tuple[int, ...]:
    """With how many tokens each level but the first was last written, of so many; 0: with none.

    A batch that fills level 0 ends in the level behind those that hold a half, which its number
    tells: with the last of its bits that is set.
    """
    return tuple(_last_write(shape, middle, level) for level in range(1, shape.levels))


def _last_write(shape: Shape, middle: int, level: int) -> int:
    last = shape.levels - 1
    for r in range((middle // shape.before).bit_length(), -1, -1):
        whole = shape.block << r
        least = 2 ** (last - 1) if r else 0  # batches that the halving before it left
        most = min(2**last, middle // whole)
        step = 2 ** (level - 1)
        batch = most // step * step
        if level < last and batch // step % 2 == 0:
            batch -= step
        if batch > least:
            return batch * whole
    return 0


def log_weights(shape: Shape, middle: UInt32[Array, "..."]) -> Float32[Array, "... S"]:
    """The log of what each slot's token stands for."""
    level = np.maximum(np.arange(shape.slots) // shape.half - 1, 0).astype(np.int32)
    r = raised(shape, middle)[..., None].astype(jnp.int32)
    times = r + level.reshape(*[1] * middle.ndim, -1)
    return times.astype(jnp.float32) * np.float32(np.log(2))


def before_half(shape: Shape, middle: UInt32[Array, "..."]) -> Int32[Array, "... P"]:
    """How many tokens stand before each half's in the order of the text: the last level has the
    oldest. A group that has begun counts, whether its token has come or not."""
    full = fills(shape, middle)
    before = jnp.cumsum(full[..., ::-1], axis=-1)[..., ::-1] - full
    first = before[..., :1]
    return jnp.concatenate([first, first + shape.half, before[..., 1:]], axis=-1)
