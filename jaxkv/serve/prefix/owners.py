"""Whose entry is evicted: owners have equal shares of a full memory, and borrow what is free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from time import monotonic
from typing import Generic, Protocol, TypeVar, runtime_checkable

Owner = str | None
IDLE = 600.0  # seconds without a lookup after which an owner loses its share


@runtime_checkable
class Owned(Protocol):
    """An entry. refs: its current readers and writers."""

    owner: Owner
    refs: int


OwnedItem = TypeVar("OwnedItem", bound=Owned)


class Shares:
    """The order in which owners lose entries.

    First idle owners, then the owner with the most entries. Among equals, the owner who needs the
    place loses first. So nobody with less than an equal share loses an entry to another.
    """

    def __init__(self) -> None:
        self._used: dict[Owner, float] = {}

    def touch(self, owner: Owner) -> None:
        """Note a lookup of an owner."""
        self._used[owner] = monotonic()

    def order(self, sizes: dict[Owner, int], requester: Owner) -> list[Owner]:
        """The owners, the first to lose an entry first.

        sizes: their numbers of entries. requester: the owner who needs a place.
        """
        if len(self._used) > 2 * len(sizes) + 64:
            self._used = {owner: at for owner, at in self._used.items() if owner in sizes}
        since, used = monotonic() - IDLE, self._used
        return sorted(
            sizes,
            key=lambda owner: (used.get(owner, since) <= since, sizes[owner], owner == requester),
            reverse=True,
        )


class FairLRU(Generic[OwnedItem]):
    """Items by owner, least recently used first. Items in use stay and count."""

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

    def oldest(self, requester: Owner) -> OwnedItem | None:
        """The item that makes room for the requester; None if all that may are in use."""
        owners = [requester]
        if len(self._items) > 1 or requester not in self._items:  # one owner is the usual case
            sizes = {owner: len(items) for owner, items in self._items.items()}
            owners = self._shares.order({requester: 0} | sizes, requester)
        for owner in owners:
            item = next((item for item in self._items.get(owner, ()) if not item.refs), None)
            if item is not None or owner == requester:
                return item
        return None

    def __iter__(self) -> Iterator[OwnedItem]:
        """All items, each owner's in the order of their last use."""
        return chain.from_iterable(self._items.values())
