"""Parts of cache states on the device, in rows that are written once and read often.

Of a state some leaves hold each token in a slot of its own and never change it (`policy.appends`):
they lie in pages, one a chunk of the grid, and states that began alike share them. All else is kept
whole, in a record behind every page or for every snapshot. A row of a batch is never a view of this
pool: it is copied out, so that whatever it does afterwards, the pool stays as it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, State, is_letters
from jaxkv.typing import Array, Int32

States = tuple[State, ...]
Leaf = Any  # an array or its shape
Leaves = list[Leaf]


class Pool(NamedTuple):
    """pages: of each leaf that is appended to, [P, ... page ...]; records: of each other, [R, ...].

    The axis of rows, which every leaf of a state begins with, is that of pages and records here.
    """

    pages: Leaves
    records: Leaves


class Layout(NamedTuple):
    """How the leaves of a state are divided. axes: of each leaf the axis that holds slots where
    it lies in pages, None where it is kept whole. page: slots. most: pages of a row."""

    axes: tuple[int | None, ...]
    page: int
    most: int


def appended(policies: tuple[Policy, ...]) -> tuple[int | None, ...]:
    """Of each leaf of all layers the axis of its slots where tokens are appended to it."""
    axes: list[int | None] = []
    for policy in policies:
        names = getattr(policy, "appends", ())
        leaves, _ = jax.tree_util.tree_flatten_with_path(policy.axes, is_leaf=is_letters)
        for path, letters in leaves:
            name = ".".join(key.name for key in path)
            axes.append(letters.index("S") if name in names else None)
    return tuple(axes)


def layout(policies: tuple[Policy, ...], states: States, page: int) -> Layout:
    """The division of these states into pages of so many slots."""
    axes = appended(policies)
    sizes = [
        leaf.shape[axis]
        for leaf, axis in zip(jax.tree.leaves(states), axes, strict=True) if axis is not None
    ]  # fmt: skip
    return Layout(axes, page, min(sizes, default=0) // page)


def empty(how: Layout, states: States, pages: int, records: int) -> Pool:
    """A pool for so many pages and records of states like these."""
    paged, whole = _divide(how, jax.tree.leaves(states))

    def one(leaf: Leaf, count: int, axis: int | None) -> Array:
        shape = [count, *leaf.shape[1:]]
        if axis is not None:
            shape[axis] = how.page
        return jnp.zeros(shape, leaf.dtype)

    slots = [axis for axis in how.axes if axis is not None]
    return Pool(
        [one(leaf, pages, axis) for leaf, axis in zip(paged, slots, strict=True)],
        [one(leaf, records, None) for leaf in whole],
    )


def save(
    how: Layout,
    pool: Pool,
    states: States,
    number: Int32[Array, ""],
    page: Int32[Array, ""],
    record: Int32[Array, ""],
) -> Pool:
    """The pool with page `number` of a row as its page `page`, and all else as `record`; a page
    or record beyond the last is written nowhere."""
    paged, whole = _divide(how, jax.tree.leaves(states))
    slots = [axis for axis in how.axes if axis is not None]
    start = number * how.page

    def cut(leaf: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(leaf, start, how.page, axis)[0]

    return Pool(
        [_put(old, cut(new, axis), page)
         for old, new, axis in zip(pool.pages, paged, slots, strict=True)],
        [_put(old, new[0], record) for old, new in zip(pool.records, whole, strict=True)],
    )  # fmt: skip


def load(
    how: Layout,
    like: States,
    pool: Pool,
    pages: Int32[Array, " M"],
    count: Int32[Array, ""],
    record: Int32[Array, ""],
) -> States:
    """A row of these pages, the first `count` of them, and that record; like: shapes of a row."""
    leaves, treedef = jax.tree.flatten(like)
    paged, whole = iter(pool.pages), iter(pool.records)
    made = [
        jax.lax.dynamic_index_in_dim(next(whole), record, 0)
        if axis is None
        else _gather(how, leaf, axis, next(paged), pages, count)
        for leaf, axis in zip(leaves, how.axes, strict=True)
    ]
    return jax.tree.unflatten(treedef, made)


def _gather(how: Layout, like: Leaf, axis: int, pool: Array, pages: Array, count: Array) -> Array:
    """One leaf of a row from its pages; 0 behind them, as it began."""

    def copy(number: Array, leaf: Array) -> Array:
        page = jax.lax.dynamic_index_in_dim(pool, pages[number], 0)
        return jax.lax.dynamic_update_slice_in_dim(leaf, page, number * how.page, axis)

    return jax.lax.fori_loop(0, count, copy, jnp.zeros(like.shape, like.dtype))


def _put(old: Array, new: Array, at: Array) -> Array:
    return old.at[at].set(new, mode="drop")


def _divide(how: Layout, leaves: Leaves) -> tuple[Leaves, Leaves]:
    each = list(zip(leaves, how.axes, strict=True))
    return (
        [leaf for leaf, axis in each if axis is not None],
        [leaf for leaf, axis in each if axis is None],
    )


NOWHERE = np.int32(2**31 - 1)  # a page or a record that is not written
