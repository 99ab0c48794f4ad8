"""Prefixes on the device: what is kept of prompts that were read, and taken up again.

Where a policy appends every token to a slot of its own, pages of a chunk are kept and shared by all
that begin alike. Any other cache has forgotten something by then, so whole states are kept, at few
of the places where one may go on from. Either is only ever taken up on the grid of chunks on which
it was made: a prompt that goes on from there is computed bit for bit as it is from the beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Pages as SlotPages
from jaxkv.engine import pool
from jaxkv.engine.figures import of_prefixes
from jaxkv.engine.host import Host, move
from jaxkv.engine.pool import NOWHERE, Layout, Pool
from jaxkv.engine.programs import Lane, Model, Programs
from jaxkv.errors import one_of, whole
from jaxkv.policy_spec import format_policy
from jaxkv.prefix.blocks import BlockPool
from jaxkv.prefix.keys import TOKEN, Prompt, root
from jaxkv.prefix.lease import Lease
from jaxkv.prefix.orders import ORDERS
from jaxkv.prefix.snapshots import Snapshots, Visit, rules
from jaxkv.state import batch, memory


@dataclass(frozen=True)
class Prefixes:
    """How prefixes are kept.

    slots: pages of one chunk each, or states, on the device. order: in which pages that nobody
    reads are evicted: linked, nested or frequency. where: at which chunks of a prompt states are
    kept: `last` the deepest that it could be taken up at again, `junction` the deepest up to which
    it is like one before, `every=N`; joined by +. host_slots: pages or states in the memory of the
    host, for what the device has no more room for.
    """

    slots: int = 256
    order: str = "linked"
    where: str = "last+junction"
    host_slots: int = 0

    def __post_init__(self) -> None:
        whole("slots", self.slots)
        whole("host_slots", self.host_slots, 0)
        one_of("order", self.order, ORDERS)
        rules(self.where)


class Hit(NamedTuple):
    """What was found of a prompt: its first `at` tokens need not be computed."""

    at: int
    held: Lease | Visit


@runtime_checkable
class Store(Protocol):
    """What the engine asks of either. bytes: on the device."""

    bytes: int

    def find(self, tokens: tuple[int, ...], salt: str | None) -> Hit | None: ...

    def load(self, hit: Hit) -> Lane: ...

    def save(self, hit: Hit, lane: Lane, at: int) -> None: ...

    def release(self, hit: Hit) -> None: ...

    def pin(self, tokens: tuple[int, ...], salt: str | None) -> Hit: ...

    def reset(self) -> bool: ...

    def figures(self) -> dict[str, Any]: ...


def store_of(how: Prefixes, model: Model, programs: Programs, chunk: int, seed: int) -> Store:
    """The store that suits a model's policies.

    Raises UserError where it does not fit into memory.
    """
    paged = pool.appends(model.policies)
    return (Pages if paged else States)(how, model, programs, chunk, seed)


def root_of(model: Model, chunk: int, seed: int, salt: str | None) -> bytes:
    """What the keys of a salt begin from: all that a cache depends on besides its tokens."""
    return root(
        policy=format_policy(model.policies), model=model.identity, spec=repr(model.spec),
        chunk=chunk, seed=seed, salt=salt,
    )  # fmt: skip


class Pages:
    """Pages of one chunk, and behind each what is kept beside them."""

    def __init__(
        self, how: Prefixes, model: Model, programs: Programs, chunk: int, seed: int
    ) -> None:
        self.index = BlockPool(chunk, how.slots, mode="full", order=how.order, host=how.host_slots)
        self._root = partial(root_of, model, chunk, seed)
        self._chunk, self._slots = chunk, how.slots
        layout = pool.appending(model.policies, programs.lane.states, chunk)
        far = how.host_slots > 0
        self._device = Device(layout, programs, model.vocab, how.slots, how.slots, movable=far)
        self.bytes = self._device.bytes
        self._host = Host(how.host_slots, self.bytes // how.slots)

    def find(self, tokens: tuple[int, ...], salt: str | None) -> Hit | None:
        """A prompt's pages, held until `release`: as many of the first as can be had."""
        prompt = self.index.read(tokens, self._root(salt))
        # A tail that fills no page is kept by nobody, nor what there are no pages for.
        lease = self.index.admit(prompt, room=-(len(tokens) % self._chunk), partly=True)
        move(self.index.moves, self._host, self._device.take, self._device.put)
        return None if lease is None else Hit(lease.cached, lease)

    def load(self, hit: Hit) -> Lane:
        count = hit.at // self._chunk
        return self._device.load(hit.held.pages[:count], hit.held.pages[count - 1])

    def save(self, hit: Hit, lane: Lane, at: int) -> None:
        """Keep the page that a lane has filled, unless another request did so first."""
        most = min(self._device.layout.most, len(hit.held.blocks))
        if at % self._chunk or at // self._chunk > most:
            return
        number = at // self._chunk - 1
        page = hit.held.pages[number]
        self.index.publish(hit.held, at)
        if hit.held.pages[number] == page:
            self._device.save(lane, number, page, page)

    def release(self, hit: Hit) -> None:
        self.index.release(hit.held)

    def pin(self, tokens: tuple[int, ...], salt: str | None) -> Hit:
        """Hold what is there of a prompt on the device until `release`."""
        lease = self.index.pin(self.index.read(tokens, self._root(salt)))
        move(self.index.moves, self._host, self._device.take, self._device.put)
        return Hit(lease.cached, lease)

    def reset(self) -> bool:
        if not self.index.reset():
            return False
        self._host.clear()
        return True

    def figures(self) -> dict[str, Any]:
        index, used, host = self.index, self._slots - self.index.free, self._host.slots
        return of_prefixes(index.counts, self._slots, used, index.active, host, index.host_taken)


class States:
    """States at few of the boundaries that were passed, some of them in the host's memory.

    On the device they share the pages of what is rewritten seldom.
    """

    def __init__(
        self, how: Prefixes, model: Model, programs: Programs, chunk: int, seed: int
    ) -> None:
        self.index = Snapshots(how.slots, chunk, how.where, how.host_slots)
        self._root, self._slots = partial(root_of, model, chunk, seed), how.slots
        layout = pool.settling(model.policies)
        self._names = partial(
            page_names, pool.pages_of(model.policies[0]) if layout.most else None, chunk
        )
        count = layout.most * how.slots
        self._device = Device(layout, programs, model.vocab, count, how.slots)
        self._pages = SharedPages(count)
        self._host = Host(how.host_slots, programs.lane_bytes)
        self.bytes = self._device.bytes

    def find(self, tokens: tuple[int, ...], salt: str | None) -> Hit | None:
        visit = self.index.visit(self.index.read(tokens, self._root(salt)))
        move(self.index.moves, self._host, self._take, self._put)
        return Hit(visit.at, visit)

    def load(self, hit: Hit) -> Lane:
        return self._load(hit.held.snapshot.slot)

    def save(self, hit: Hit, lane: Lane, at: int) -> None:
        """Keep a lane's state where it was planned and room can be had."""
        if at not in hit.held.save:
            return
        snapshot = self.index.claim(hit.held.prompt, at)
        if snapshot is None:
            return
        move(self.index.moves, self._host, self._take, self._put)
        self._save(lane, snapshot.slot, self._names(hit.held.prompt, at))
        self.index.publish(snapshot)

    def _load(self, slot: int) -> Lane:
        return self._device.load(self._pages.of(slot), slot)

    def _save(self, lane: Lane, slot: int, names: list[Hashable]) -> None:
        """Write a state into a slot, and those of its pages that no other state has."""
        self._pages.release(slot)
        for number, page in self._pages.take(slot, names):
            self._device.save(lane, number, page, NOWHERE)
        self._device.save(lane, 0, NOWHERE, slot)

    def release(self, hit: Hit) -> None:
        self.index.leave(hit.held)

    def pin(self, tokens: tuple[int, ...], salt: str | None) -> Hit:
        """Hold the deepest state of a prompt that can be had on the device until `release`."""
        visit = self.index.hold(self.index.read(tokens, self._root(salt)))
        move(self.index.moves, self._host, self._take, self._put)
        return Hit(visit.at, visit)

    def reset(self) -> bool:
        if not self.index.reset():
            return False
        self._pages.clear()
        self._host.clear()
        return True

    def figures(self) -> dict[str, Any]:
        index, held, host = self.index, self.index.held, self._host.slots
        return of_prefixes(index.counts, self._slots, index.taken, held, host, index.host_taken)

    def _take(self, slot: int) -> tuple[pool.States, list[Hashable]]:
        return self._load(slot).states, self._pages.names(slot)

    def _put(self, slot: int, states: pool.States, names: list[Hashable]) -> None:
        self._save(Lane(states, None), slot, names)


def page_names(pages: SlotPages | None, chunk: int, prompt: Prompt, at: int) -> list[Hashable]:
    """What each page of a state after `at` tokens of a prompt is known by: root and tokens up to
    the boundary behind which it was not written, and the token with which it was. pages: None where
    there are none."""
    names: list[Hashable] = []
    for number, last in enumerate(pages.last_write(at) if pages is not None else ()):
        boundary = -(-last // chunk)
        # Not by its key, which something else may have.
        names.append((prompt.root + prompt.data[: boundary * chunk * TOKEN], last, number))
    return names


class SharedPages:
    """Which pages the state in a slot is made of: those with one name are one.

    count: pages that there are, enough for every slot to have its own.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.clear()

    def clear(self) -> None:
        """Give up all of them."""
        self._free = list(reversed(range(self._count)))
        self._by_name: dict[Hashable, int] = {}
        self._readers: Counter[Hashable] = Counter()
        self._tables: dict[int, list[Hashable]] = {}

    @property
    def taken(self) -> int:
        return len(self._by_name)

    def of(self, slot: int) -> list[int]:
        """The pages of a slot, in order."""
        return [self._by_name[name] for name in self._tables.get(slot, ())]

    def names(self, slot: int) -> list[Hashable]:
        return self._tables.get(slot, [])

    def take(self, slot: int, names: list[Hashable]) -> list[tuple[int, int]]:
        """Make up a slot of these pages; which of them are new, as (number, page)."""
        new = [number for number, name in enumerate(names) if name not in self._by_name]
        for number in new:
            self._by_name[names[number]] = self._free.pop()
        self._readers.update(names)
        self._tables[slot] = names
        return [(number, self._by_name[names[number]]) for number in new]

    def release(self, slot: int) -> None:
        """Give up what a slot is made of, if it is."""
        for name in self._tables.pop(slot, ()):
            self._readers[name] -= 1
            if not self._readers[name]:
                del self._readers[name]
                self._free.append(self._by_name.pop(name))


class Device:
    """A pool with its programs: to keep something of a lane, and to make a lane of what is kept.

    movable: `take` and `put` are wanted, of pages and records of one number.
    """

    def __init__(
        self, layout: Layout, programs: Programs, vocab: int, pages: int, records: int,
        movable: bool = False,
    ) -> None:  # fmt: skip
        states, zero = programs.lane.states, np.int32(0)
        shape = jax.eval_shape(lambda: pool.empty(layout, states, pages, records))
        self.bytes = batch.nbytes(shape)
        memory.check(self.bytes, f"{max(pages, records)} prefixes", fewer="of their slots")

        def load(kept: Pool, numbers: jax.Array, count: jax.Array, record: jax.Array) -> Lane:
            made = pool.load(layout, states, kept, numbers, count, record)
            return Lane(made, jnp.zeros((1, vocab), jnp.float32))

        table = np.zeros(max(1, layout.most), np.int32)
        self._pool = programs.compile(lambda: pool.empty(layout, states, pages, records))()
        self._save = programs.compile(
            partial(pool.save, layout), shape, states, zero, zero, zero, donate=0
        )
        self._load = programs.compile(load, shape, table, zero, zero)
        if movable:
            piece = jax.eval_shape(pool.take, shape, zero, zero)
            self._take = programs.compile(pool.take, shape, zero, zero)
            self._put = programs.compile(pool.put, shape, piece, zero, zero, donate=0)
        self._table, self.layout = table, layout

    def save(self, lane: Lane, number: int, page: int, record: int) -> None:
        """Keep page `number` of a lane as `page`, and what lies in none as `record`."""
        self._pool = self._save(
            self._pool, lane.states, np.int32(number), np.int32(page), np.int32(record)
        )

    def load(self, pages: list[int], record: int) -> Lane:
        """A lane of these pages and that record; the pool stays as it is."""
        table = self._table.copy()
        table[: len(pages)] = pages
        return self._load(self._pool, table, np.int32(len(pages)), np.int32(record))

    def take(self, page: int) -> tuple[Pool, None]:
        """A page and the record beside it, of the same number, for `put`."""
        return self._take(self._pool, np.int32(page), np.int32(page)), None

    def put(self, page: int, taken: Pool, _: None = None) -> None:
        """A page and the record beside it, as they were."""
        self._pool = self._put(self._pool, taken, np.int32(page), np.int32(page))
