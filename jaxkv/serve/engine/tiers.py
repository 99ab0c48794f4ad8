"""The arrays of cached prefixes by place: on the device and in the host's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.contract import Pages
from jaxkv.serve.engine import pool
from jaxkv.serve.engine.placement import is_split, placed_pool, pool_shardings, with_sharding
from jaxkv.serve.engine.pool import SKIP, Layout, Pool
from jaxkv.serve.engine.prefill import PrefillState
from jaxkv.serve.engine.programs import Programs
from jaxkv.serve.prefix.block_hash import TOKEN, HashedPrompt
from jaxkv.serve.prefix.index import Entry
from jaxkv.state import memory
from jaxkv.state.sharding import bytes_per_device

PageIds = list[Hashable]


class BlockTier:
    """The blocks of append-only caches: a page each, and a record of the same number.

    movable: blocks also move to other tiers. like: the shapes of one block. bytes: of all blocks.
    """

    def __init__(
        self, layout: Layout, programs: Programs, vocab: int, capacity: int, movable: bool
    ) -> None:
        self._pool = DevicePool(layout, programs, vocab, capacity, capacity, movable)
        self._chunk = layout.page_size
        self.bytes = self._pool.bytes
        self.like = self._pool.piece if movable else None

    def load(self, entries: Sequence[Entry]) -> PrefillState:
        """A new prefill state from the entries of a lease."""
        pages = [entry.index for entry in entries]
        return self._pool.load(pages, pages[-1])

    def save(self, entry: Entry, prompt: HashedPrompt, state: PrefillState) -> None:
        """Store what ends at the entry's boundary."""
        self._pool.save(state, entry.boundary // self._chunk - 1, entry.index, entry.index)

    def page_ids(self, prompt: HashedPrompt, at: int) -> PageIds:
        """The page ids of the entry that ends at token `at`; blocks share no pages."""
        return []

    def get(self, index: int) -> tuple[Pool, PageIds]:
        """A copy of the arrays of a place, with their page ids."""
        return self._pool.take(index), []

    take = get  # a place on the device is only overwritten, so moving an entry copies it

    def put(self, index: int, arrays: Pool, page_ids: PageIds) -> None:
        """Store arrays in a place."""
        self._pool.put(index, arrays)

    def clear(self) -> None:
        """Pages are overwritten when they are taken."""


class SnapshotTier:
    """The snapshots of evicting caches, which share equal pages of rarely rewritten leaves.

    rewritten: those pages; None if there are none. like, bytes, methods: as of BlockTier.
    """

    def __init__(
        self,
        layout: Layout,
        programs: Programs,
        vocab: int,
        capacity: int,
        chunk: int,
        rewritten: Pages | None,
    ) -> None:
        pages = layout.max_pages * capacity
        self._pool = DevicePool(layout, programs, vocab, pages, capacity)
        self.pages, self._chunk, self._rewritten = SharedPages(pages), chunk, rewritten
        self.bytes = self._pool.bytes
        self.like = programs.prefill_shapes.states

    def load(self, entries: Sequence[Entry]) -> PrefillState:
        return self._load(entries[-1].index)

    def _load(self, index: int) -> PrefillState:
        return self._pool.load(self.pages.table(index), index)

    def save(self, entry: Entry, prompt: HashedPrompt, state: PrefillState) -> None:
        self._save(entry.index, state, self.page_ids(prompt, entry.boundary))

    def _save(self, index: int, state: PrefillState, page_ids: PageIds) -> None:
        """Write a state into a place, with the pages that no other snapshot has."""
        self.pages.release(index)
        for number, page in self.pages.take(index, page_ids):
            self._pool.save(state, number, page, SKIP)
        self._pool.save(state, 0, SKIP, index)

    def page_ids(self, prompt: HashedPrompt, at: int) -> PageIds:
        return page_ids(self._rewritten, self._chunk, prompt, at)

    def get(self, index: int) -> tuple[pool.States, PageIds]:
        return self._load(index).states, self.pages.ids(index)

    take = get  # a place on the device is only overwritten, so moving an entry copies it

    def put(self, index: int, arrays: pool.States, page_ids: PageIds) -> None:
        self._save(index, PrefillState(arrays, None), page_ids)

    def clear(self) -> None:
        self.pages.clear()


class HostTier:
    """Arrays in the host's memory. size: bytes of a place.

    Raises UserError if they do not fit into memory.
    """

    def __init__(self, capacity: int, size: int) -> None:
        self._places: dict[int, tuple[Any, PageIds]] = {}
        if capacity:
            memory.check(
                capacity * size, f"{capacity} prefixes", host=True, fewer="bytes for prefixes"
            )
            memory.check_host("a prefix cache in host memory")

    def put(self, index: int, arrays: Any, page_ids: PageIds) -> None:
        self._places[index] = in_memory(arrays, "pinned_host"), page_ids

    def get(self, index: int) -> tuple[Any, PageIds]:
        """The arrays of a place, which stay there."""
        return self._places[index]

    def take(self, index: int) -> tuple[Any, PageIds]:
        """Move the arrays of a place to the device."""
        arrays, page_ids = self._places.pop(index)
        return in_memory(arrays, "device"), page_ids

    def clear(self) -> None:
        self._places.clear()


def in_memory(arrays: Any, kind: str) -> Any:
    """The same arrays in this kind of memory, those of several devices beside each of them."""
    move = lambda array: jax.device_put(array, array.sharding.with_memory_kind(kind))
    return jax.tree.map(move, arrays)


class DevicePool:
    """A pool on the device with its programs, which copy between it and prefill states.

    movable: compile `take` and `put`, for pages and records of one number.
    piece: the shapes of both.
    """

    def __init__(
        self,
        layout: Layout,
        programs: Programs,
        vocab: int,
        pages: int,
        records: int,
        movable: bool = False,
    ) -> None:
        states, zero = programs.prefill_shapes.states, np.int32(0)
        shape = jax.eval_shape(lambda: pool.empty(layout, states, pages, records))
        shape = placed_pool(programs.model, layout, shape)
        self.bytes = bytes_per_device(shape)
        memory.check(self.bytes, f"{records} prefixes", fewer="bytes for prefixes")

        def load(
            stored: Pool, numbers: jax.Array, count: jax.Array, record: jax.Array
        ) -> PrefillState:
            loaded = pool.load(layout, states, stored, numbers, count, record)
            return PrefillState(loaded, jnp.zeros((1, vocab), jnp.float32))

        place, piece_place, compile = None, None, programs.compile
        if is_split(programs.model):
            place = pool_shardings(programs.model, layout, shape)
            piece_place = jax.tree.map(
                lambda of_array: NamedSharding(of_array.mesh, PartitionSpec(*of_array.spec[1:])),
                place,
            )
        self._table = np.zeros(max(1, layout.max_pages), np.int32)
        self._pool = compile(lambda: pool.empty(layout, states, pages, records), out=place)()
        self._save = compile(
            partial(pool.save, layout), shape, states, zero, zero, zero, donate=(0,), out=place
        )
        self._load = compile(load, shape, self._table, zero, zero)
        if movable:
            self.piece = jax.eval_shape(pool.take, shape, zero, zero)
            if piece_place is not None:
                self.piece = with_sharding(self.piece, piece_place)
            self._take = compile(pool.take, shape, zero, zero, out=piece_place)
            self._put = compile(pool.put, shape, self.piece, zero, zero, donate=(0,), out=place)

    def save(self, state: PrefillState, number: int, page: int, record: int) -> None:
        """Store page `number` of a state as `page`, and its record as `record`."""
        self._pool = self._save(
            self._pool, state.states, np.int32(number), np.int32(page), np.int32(record)
        )

    def load(self, pages: list[int], record: int) -> PrefillState:
        """A prefill state with a copy of these pages and that record."""
        table = self._table.copy()
        table[: len(pages)] = pages
        return self._load(self._pool, table, np.int32(len(pages)), np.int32(record))

    def take(self, page: int) -> Pool:
        """Copy a page and the record of the same number, for `put`."""
        return self._take(self._pool, np.int32(page), np.int32(page))

    def put(self, page: int, taken: Pool) -> None:
        """Store a page and the record of the same number."""
        self._pool = self._put(self._pool, taken, np.int32(page), np.int32(page))


def page_ids(pages: Pages | None, chunk: int, prompt: HashedPrompt, at: int) -> PageIds:
    """The identity of each page of a state after `at` tokens: equal ids mean equal content.

    An id is the root and tokens up to the boundary after the page's last write, the token of that
    write, and the page number. pages: None where there are none.
    """
    ids: PageIds = []
    for number, last in enumerate(pages.last_write(at) if pages is not None else ()):
        boundary = -(-last // chunk)
        # The tokens and not their hash, which may collide.
        ids.append((prompt.root + prompt.data[: boundary * chunk * TOKEN], last, number))
    return ids


class SharedPages:
    """The pages of each snapshot; pages with equal ids are stored once.

    count: all pages, enough for every snapshot to have its own.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.clear()

    def clear(self) -> None:
        """Free all pages."""
        self._free = list(reversed(range(self._count)))
        self._by_id: dict[Hashable, int] = {}
        self._readers: Counter[Hashable] = Counter()
        self._tables: dict[int, PageIds] = {}

    @property
    def taken(self) -> int:
        return len(self._by_id)

    def table(self, index: int) -> list[int]:
        """The pages of snapshot `index`, in order."""
        return [self._by_id[id] for id in self._tables.get(index, ())]

    def ids(self, index: int) -> PageIds:
        return self._tables.get(index, [])

    def take(self, index: int, ids: PageIds) -> list[tuple[int, int]]:
        """Assign pages to snapshot `index`; returns the new ones to write, as (number, page)."""
        new = [number for number, id in enumerate(ids) if id not in self._by_id]
        for number in new:
            self._by_id[ids[number]] = self._free.pop()
        self._readers.update(ids)
        self._tables[index] = ids
        return [(number, self._by_id[ids[number]]) for number in new]

    def release(self, index: int) -> None:
        """Release the pages of snapshot `index`, if it has any."""
        for id in self._tables.pop(index, ()):
            self._readers[id] -= 1
            if not self._readers[id]:
                del self._readers[id]
                self._free.append(self._by_id.pop(id))
