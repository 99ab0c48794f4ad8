"""Parts of cache states on the device, in rows that are written once and read often.

Some leaves lie in pages: those to which a policy appends (`policy.appends`), a page for each chunk
of the grid, and slots that it rewrites seldom (`policy.settling`). States that agree on a page
share it. All else is kept whole, as a record. A row of a batch is never a view of this pool: it is
copied out, so that whatever it does afterwards, the pool stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.contract import Leaf as ContractLeaf
from jaxkv.contract import Pages, Policy, State
from jaxkv.typing import Array, Int32

States = tuple[State, ...]
Leaf = Any  # an array or its shape
NOWHERE = 2**31 - 1  # a page or a record that is not written


class Pool(NamedTuple):
    """pages: of each leaf that lies in them, [P, ... page ...]. records: of each what does not,
    [R, ...]. The axis of rows, with which every leaf of a state begins, is that of P or R here."""

    pages: list[Array]
    records: list[Array]


class Layout(NamedTuple):
    """How the leaves of a state are divided.

    axes: of each leaf the axis of its slots where some lie in pages, None where none does. first:
    slots before those. page: slots in one. most: pages of a row.
    """

    axes: tuple[int | None, ...]
    first: int
    page: int
    most: int


def appending(policies: tuple[Policy, ...], states: States, page: int) -> Layout:
    """Pages of what these policies append to."""
    axes = _axes(policies, lambda leaf: leaf.append_only)
    sizes = [
        leaf.shape[axis]
        for leaf, axis in zip(jax.tree.leaves(states), axes, strict=True) if axis is not None
    ]  # fmt: skip
    return Layout(axes, 0, page, min(sizes) // page)


def settling(policies: tuple[Policy, ...]) -> Layout:
    """Pages of what these policies rewrite seldom; none where they differ in it."""
    pages = pages_of(policies[0])
    if pages is None or len(set(policies)) > 1:
        return Layout(_axes(policies, lambda leaf: False), 0, 0, 0)
    axes = _axes(policies, lambda leaf: leaf.page is not None)
    return Layout(axes, pages.first, pages.size, len(pages.last_write(0)))


def pages_of(policy: Policy) -> Pages | None:
    """The pages in which a policy rewrites slots seldom, None where it has none."""
    leaves = jax.tree.leaves(policy.leaves)
    return next((leaf.page for leaf in leaves if leaf.page is not None), None)


def appends(policies: tuple[Policy, ...]) -> bool:
    """Whether every policy only appends to some of its arrays during prefill."""
    return all(
        any(leaf.append_only for leaf in jax.tree.leaves(policy.leaves)) for policy in policies
    )


def empty(how: Layout, states: States, pages: int, records: int) -> Pool:
    """A pool for so many pages and records of states like these."""
    pool = Pool([], [])
    for leaf, axis in _leaves(how, states):
        shape = list(leaf.shape[1:])
        if axis is not None:
            shape[axis - 1] = how.page
            pool.pages.append(jnp.zeros((pages, *shape), leaf.dtype))
            shape[axis - 1] = how.first
        pool.records.append(jnp.zeros((records, *shape), leaf.dtype))
    return pool


def save(
    how: Layout,
    pool: Pool,
    states: States,
    number: Int32[Array, ""],
    page: Int32[Array, ""],
    record: Int32[Array, ""],
) -> Pool:
    """The pool with page `number` of a row as its page `page`, and what lies in none as `record`;
    either may be NOWHERE."""
    pages, records = iter(pool.pages), iter(pool.records)
    made = Pool([], [])
    for leaf, axis in _leaves(how, states):
        if axis is not None:
            start = how.first + number * how.page
            cut = jax.lax.dynamic_slice_in_dim(leaf, start, how.page, axis)
            made.pages.append(next(pages).at[page].set(cut[0], mode="drop"))
            leaf = jax.lax.slice_in_dim(leaf, 0, how.first, axis=axis)
        made.records.append(next(records).at[record].set(leaf[0], mode="drop"))
    return made


def load(
    how: Layout,
    like: States,
    pool: Pool,
    table: Int32[Array, " M"],
    count: Int32[Array, ""],
    record: Int32[Array, ""],
) -> States:
    """A row of the first `count` pages of a table and a record, 0 behind them, as it began.

    like: the shapes of a row.
    """
    pages, records = iter(pool.pages), iter(pool.records)

    def made(leaf: Leaf, axis: int | None) -> Array:
        head = jax.lax.dynamic_index_in_dim(next(records), record, 0)
        if axis is None:
            return head
        kept, whole = next(pages), jnp.zeros(leaf.shape, leaf.dtype)

        def copy(number: Array, whole: Array) -> Array:
            page = jax.lax.dynamic_index_in_dim(kept, table[number], 0)
            at = how.first + number * how.page
            return jax.lax.dynamic_update_slice_in_dim(whole, page, at, axis)

        whole = jax.lax.dynamic_update_slice_in_dim(whole, head, 0, axis)
        return jax.lax.fori_loop(0, count, copy, whole)

    leaves = [made(leaf, axis) for leaf, axis in _leaves(how, like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def take(kept: Pool, page: Int32[Array, ""], record: Int32[Array, ""]) -> Pool:
    """One page and one record out of a pool."""
    return Pool([leaf[page] for leaf in kept.pages], [leaf[record] for leaf in kept.records])


def put(kept: Pool, taken: Pool, page: Int32[Array, ""], record: Int32[Array, ""]) -> Pool:
    """The pool with what `take` took, in its pages and records again."""
    pages = [leaf.at[page].set(one) for leaf, one in zip(kept.pages, taken.pages, strict=True)]
    pairs = zip(kept.records, taken.records, strict=True)
    return Pool(pages, [leaf.at[record].set(one) for leaf, one in pairs])


def _axes(
    policies: tuple[Policy, ...], paged: Callable[[ContractLeaf], bool]
) -> tuple[int | None, ...]:
    """For each array of all layers the axis of its slots, None where it does not lie in pages."""
    leaves = jax.tree.leaves([policy.leaves for policy in policies])
    return tuple(leaf.letters.index("S") if paged(leaf) else None for leaf in leaves)


def _leaves(how: Layout, states: States) -> list[tuple[Leaf, int | None]]:
    return list(zip(jax.tree.leaves(states), how.axes, strict=True))
