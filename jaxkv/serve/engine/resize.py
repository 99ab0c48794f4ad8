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
import numpy as np

from jaxkv.typing import Array, Int32


def begin_moves(
    begin: Callable[..., Future], batch: Any, size: int, into: Any, target_size: int
) -> list[Future]:
    """Begin to compile `move` for each leaf of a batch.

    begin: begins to compile a function for arguments. batch, into: shapes of both batches, as they
    stay on the device. size, target_size: their sequences.
    """
    pairs = list(zip(jax.tree.leaves(batch), jax.tree.leaves(into), strict=True))
    function, order = partial(move, size, target_size), np.zeros(min(size, target_size), "i4")
    futures = {
        (leaf, to): begin(function, leaf, to, order, np.int32(0), donate=(1,))
        for leaf, to in {*pairs}
    }
    return [futures[pair] for pair in pairs]


def move(
    size: int, target_size: int, leaf: Array, into: Array, order: Int32[Array, " C"],
    count: Int32[Array, ""],
) -> Array:  # fmt: skip
    """Copy entries `order` of a leaf of `size` sequences to the first `count` ones of another leaf.

    C: the smaller size. Other entries of `into` do not change.
    """
    # In two dimensions XLA:CPU updates the array in place.
    rows = leaf.reshape(size, -1)

    def copy(number: Array, moved: Array) -> Array:
        return moved.at[number].set(rows[order[number]])

    return jax.lax.fori_loop(0, count, copy, into.reshape(target_size, -1)).reshape(into.shape)
