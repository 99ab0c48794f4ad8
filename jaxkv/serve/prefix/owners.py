"""Whose entry is evicted: owners have equal shares of a full memory, and borrow what is free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain
from time import monotonic
from typing import Generic, Protocol, TypeVar, runtime_checkable

from jaxkv.serve.prefix.eviction import ORDERS, EvictionOrder

Owner = str | None
IDLE = 600.0  # seconds without a lookup after which an owner loses its share


@runtime_checkable
class Owned(Protocol):
    """An entry. refs: its current readers."""

    owner: Owner
    refs: int


OwnedItem = TypeVar("OwnedItem", bound=Owned)


class Shares:
    """The order in which owners lose entries.

    First idle owners, then the owner with the most entries; of equal ones the owner who needs the
    entry. So nobody with less than an equal share loses an entry to another.
    """

    def __init__(self) -> None:
        self._used: dict[Owner, float] = {}

    def touch(self, owner: Owner) -> None:
        """Note a lookup of an owner."""
        self._used[owner] = monotonic()

    def order(self, sizes: dict[Owner, int], wanting: Owner) -> list[Owner]:
        """The owners, the first to lose an entry first. sizes: their numbers of entries."""
        if len(self._used) > 2 * len(sizes) + 64:
            self._used = {owner: at for owner, at in self._used.items() if owner in sizes}
        since, used = monotonic() - IDLE, self._used
        return sorted(
            sizes,
            key=lambda owner: (used.get(owner, since) <= since, sizes[owner], owner == wanting),
            reverse=True,
        )


class FairOrder:
    """An eviction order for each owner, and the choice among owners. order: as in ORDERS."""

    def __init__(self, order: str, shares: Shares) -> None:
        self._make, self._shares = ORDERS[order], shares
        self._orders: dict[Owner, EvictionOrder] = {}
        self._sizes: dict[Owner, int] = {}

    def add(self, item: Owned, time: int, depth: int, uses: int) -> None:
        owner = item.owner
        if owner in self._sizes:
            self._sizes[owner] += 1
        else:
            self._orders[owner], self._sizes[owner] = self._make(), 1
        self._orders[owner].add(item, time, depth, uses)

    def remove(self, item: Owned) -> None:
        self._orders[item.owner].remove(item)
        self._removed(item.owner)

    def available(self, wanting: Owner, held: int, limit: int) -> int:
        """How many items may be evicted for an owner, counted up to `limit` of other owners.

        held: entries that are not here and count for this owner.
        """
        other_sizes, taken = dict(self._sizes), 0
        own_size = other_sizes.pop(wanting, 0)
        while other_sizes and taken < limit:
            sizes = other_sizes | {wanting: held + own_size + taken}
            first = self._shares.order(sizes, wanting)[0]
            if first == wanting:
                break
            other_sizes[first] -= 1
            taken += 1
            if not other_sizes[first]:
                del other_sizes[first]
        return own_size + taken

    def pop(self, wanting: Owner, held: int = 0) -> Hashable:
        """Remove and return the next item to evict for an owner. held: as in `available`."""
        order = self._orders
        if len(self._orders) > 1:  # one owner is the usual case
            sizes = self._sizes | {wanting: self._sizes.get(wanting, 0) + held}
            order = self._shares.order(sizes, wanting)
        owner = next(owner for owner in order if owner in self._orders)
        item = self._orders[owner].pop()
        self._removed(owner)
        return item

    def _removed(self, owner: Owner) -> None:
        self._sizes[owner] -= 1
        if not self._sizes[owner]:
            del self._orders[owner], self._sizes[owner]

    def __len__(self) -> int:
        return sum(self._sizes.values())

    def __iter__(self) -> Iterator[Hashable]:
        """All items, each owner's in eviction order."""
        return chain.from_iterable(self._orders.values())


class FairLRU(Generic[OwnedItem]):
    """Items by owner, least recently used first. Items in use stay."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._items: dict[Owner, OrderedDict[OwnedItem, None]] = {}

    def add(self, item: OwnedItem) -> None:
        """Insert an item as the most recently used of its owner."""
        self._items.setdefault(item.owner, OrderedDict())[item] = None

    def touch(self, item: OwnedItem) -> None:
        """Mark an item as the most recently used of its owner."""
        self._items[item.owner].move_to_end(item)

    def remove(self, item: OwnedItem) -> None:
        items = self._items[item.owner]
        del items[item]
        if not items:
            del self._items[item.owner]

    def oldest(self, wanting: Owner) -> OwnedItem | None:
        """The item that loses its entry to an owner; None if all are in use."""
        order = self._items
        if len(self._items) > 1:
            sizes = {owner: len(items) for owner, items in self._items.items()}
            order = self._shares.order(sizes, wanting)
        for owner in order:
            item = next((item for item in self._items[owner] if not item.refs), None)
            if item is not None:
                return item
        return None

    def __contains__(self, item: OwnedItem) -> bool:
        return item in self._items.get(item.owner, ())

    def __iter__(self) -> Iterator[OwnedItem]:
        return chain.from_iterable(self._items.values())
