"""Programs that move sequences between decode batches of two sizes.

Each moves one leaf, and leaves of equal shapes share one: a single program for all leaves of 30
layers took longer to compile than a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.typing import Array, Int32


def begin_moves(
    begin: Callable[..., Future], old: Any, new: Any, carried: Any, result: Any
) -> list[Future]:
    """Begin to compile `move` for each leaf of a batch.

    begin: begins to compile a function for arguments. old, new: shapes of both batches. carried,
    result: their shapes in the form that stays on the device.
    """
    keys = list(zip(*map(jax.tree.leaves, (old, new, result, carried)), strict=True))
    count = min(leaf[0].shape[0] for leaf in (jax.tree.leaves(old), jax.tree.leaves(new)))
    begun: dict[tuple, Future] = {}
    for *shapes, leaf in keys:
        if (*shapes, leaf) not in begun:
            function = partial(move, *shapes)
            begun[*shapes, leaf] = begin(function, leaf, np.zeros(count, "i4"), np.int32(0))
    return [begun[key] for key in keys]


def move(
    old: jax.ShapeDtypeStruct,
    new: jax.ShapeDtypeStruct,
    result: jax.ShapeDtypeStruct,
    leaf: Array,
    order: Int32[Array, " C"],
    count: Int32[Array, ""],
) -> Array:
    """A leaf for a batch of another size, whose first `count` entries are those at `order`.

    old, new: its shapes with B as first axis, before and after. result: the shape to return.
    C: the size of the smaller batch.
    """
    leaf = leaf.reshape(old.shape)

    def copy(number: Array, made: Array) -> Array:
        return made.at[number].set(leaf[order[number]])

    made = jax.lax.fori_loop(0, count, copy, jnp.zeros(new.shape, new.dtype))
    return made.reshape(result.shape)
