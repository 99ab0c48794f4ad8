"""Cached prefixes on the device: pages of cache states, written once and read often.

Some leaves are stored in pages: append-only leaves in one page per prefill chunk, and rarely
rewritten leaves in pages of their own. States with equal pages share them. All other leaves are
stored whole, as a record. A batch entry is a copy and never a view of this pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.contract import Leaf, Pages, Policy, State
from jaxkv.state.batch import Shaped
from jaxkv.typing import Array, Int32

States = tuple[State, ...]
SKIP = 2**31 - 1  # index of a page or a record that is not written


class Pool(NamedTuple):
    """pages: a [P, ... page_size ...] per paged leaf. records: the rest of every leaf [R, ...].

    P or R replaces the batch axis B with which every leaf of a state begins.
    """

    pages: list[Array]
    records: list[Array]


class Layout(NamedTuple):
    """How the leaves of a state are split into pages and a record.

    axes: for each leaf its axis S if it has pages, else None. first: slots before the first page.
    page_size: slots in a page. max_pages: pages of a sequence.
    """

    axes: tuple[int | None, ...]
    first: int
    page_size: int
    max_pages: int


def block_layout(policies: tuple[Policy, ...], states: States, page_size: int) -> Layout:
    """The layout of append-only caches: pages of `page_size` slots of their append-only leaves."""
    axes = _axes(policies, lambda leaf: leaf.append_only)
    sizes = [
        leaf.shape[axis]
        for leaf, axis in zip(jax.tree.leaves(states), axes, strict=True)
        if axis is not None
    ]
    return Layout(axes, 0, page_size, min(sizes) // page_size)


def snapshot_layout(policies: tuple[Policy, ...]) -> Layout:
    """The layout of snapshots: pages of rarely rewritten leaves; none if the layers differ."""
    pages = pages_of(policies[0])
    if pages is None or len(set(policies)) > 1:
        return Layout(_axes(policies, lambda leaf: False), 0, 0, 0)
    axes = _axes(policies, lambda leaf: leaf.page is not None)
    return Layout(axes, pages.first, pages.size, len(pages.last_write(0)))


def prefix_layout(policies: tuple[Policy, ...], states: States, chunk: int) -> Layout:
    """The layout of prefixes: blocks of one chunk if all caches are append-only, else snapshots."""
    if all_append_only(policies):
        return block_layout(policies, states, chunk)
    return snapshot_layout(policies)


def shapes_of_prefix(layout: Layout, policies: tuple[Policy, ...], states: States) -> Pool:
    """The shapes of a pool of one block or snapshot."""
    pages = 1 if all_append_only(policies) else layout.max_pages
    return jax.eval_shape(lambda: empty(layout, states, pages, 1))


def pages_of(policy: Policy) -> Pages | None:
    """The pages in which a policy rewrites slots seldom, None where it has none."""
    leaves = jax.tree.leaves(policy.leaves)
    return next((leaf.page for leaf in leaves if leaf.page is not None), None)


def all_append_only(policies: tuple[Policy, ...]) -> bool:
    """Whether every policy only appends to some of its arrays during prefill."""
    return all(
        any(leaf.append_only for leaf in jax.tree.leaves(policy.leaves)) for policy in policies
    )


def empty(layout: Layout, states: States, pages: int, records: int) -> Pool:
    """An empty pool of `pages` pages and `records` records for states of these shapes."""
    pool = Pool([], [])
    for leaf, axis in _leaves(layout, states):
        shape = list(leaf.shape[1:])
        if axis is not None:
            shape[axis - 1] = layout.page_size
            pool.pages.append(jnp.zeros((pages, *shape), leaf.dtype))
            shape[axis - 1] = layout.first
        pool.records.append(jnp.zeros((records, *shape), leaf.dtype))
    return pool


def save(
    layout: Layout,
    pool: Pool,
    states: States,
    number: Int32[Array, ""],
    page: Int32[Array, ""],
    record: Int32[Array, ""],
) -> Pool:
    """Store page `number` of a sequence as page `page`, and its record as `record`.

    Either index may be SKIP.
    """
    pages, records = iter(pool.pages), iter(pool.records)
    saved = Pool([], [])
    for leaf, axis in _leaves(layout, states):
        if axis is not None:
            start = layout.first + number * layout.page_size
            cut = jax.lax.dynamic_slice_in_dim(leaf, start, layout.page_size, axis)
            saved.pages.append(next(pages).at[page].set(cut[0], mode="drop"))
            leaf = jax.lax.slice_in_dim(leaf, 0, layout.first, axis=axis)
        saved.records.append(next(records).at[record].set(leaf[0], mode="drop"))
    return saved


def load(
    layout: Layout,
    like: States,
    pool: Pool,
    table: Int32[Array, " M"],
    count: Int32[Array, ""],
    record: Int32[Array, ""],
) -> States:
    """Build a sequence's states from a record and the first `count` pages of a table.

    Slots after the pages are 0, as in a new state. like: the shapes of the states.
    """
    pages, records = iter(pool.pages), iter(pool.records)

    def load_leaf(leaf: Shaped, axis: int | None) -> Array:
        head = jax.lax.dynamic_index_in_dim(next(records), record, 0)
        if axis is None:
            return head
        pool_pages, loaded = next(pages), jnp.zeros(leaf.shape, leaf.dtype)

        def copy(number: Array, loaded: Array) -> Array:
            page = jax.lax.dynamic_index_in_dim(pool_pages, table[number], 0)
            at = layout.first + number * layout.page_size
            return jax.lax.dynamic_update_slice_in_dim(loaded, page, at, axis)

        loaded = jax.lax.dynamic_update_slice_in_dim(loaded, head, 0, axis)
        return jax.lax.fori_loop(0, count, copy, loaded)

    leaves = [load_leaf(leaf, axis) for leaf, axis in _leaves(layout, like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def take(pool: Pool, page: Int32[Array, ""], record: Int32[Array, ""]) -> Pool:
    """Copy one page and one record out of a pool."""
    return Pool([leaf[page] for leaf in pool.pages], [leaf[record] for leaf in pool.records])


def put(pool: Pool, taken: Pool, page: Int32[Array, ""], record: Int32[Array, ""]) -> Pool:
    """Store a page and a record from `take` in the pool."""
    pages = [leaf.at[page].set(new) for leaf, new in zip(pool.pages, taken.pages, strict=True)]
    pairs = zip(pool.records, taken.records, strict=True)
    return Pool(pages, [leaf.at[record].set(new) for leaf, new in pairs])


def _axes(policies: tuple[Policy, ...], paged: Callable[[Leaf], bool]) -> tuple[int | None, ...]:
    """For each leaf of all layers its axis S if it is paged, else None."""
    leaves = jax.tree.leaves([policy.leaves for policy in policies])
    return tuple(leaf.letters.index("S") if paged(leaf) else None for leaf in leaves)


def _leaves(layout: Layout, states: States) -> list[tuple[Shaped, int | None]]:
    return list(zip(jax.tree.leaves(states), layout.axes, strict=True))
