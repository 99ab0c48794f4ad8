"""In which order prefixes that nobody uses are evicted.

All three take an item with the time at which it was last used, its depth (how many blocks lead to
it) and how often it was used. An item's ancestors must have been used no earlier and no more
seldom; then no order evicts an item before those that lead on from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

SLACK = 64  # removed items that may stay in a heap besides one for each that is in it


class Order(Protocol):
    """What an eviction order is."""

    def add(self, item: Hashable, time: int, depth: int, uses: int) -> None:
        """Put in an item that is not in it."""

    def remove(self, item: Hashable) -> None:
        """Take out an item; raises KeyError where it is not in it."""

    def pop(self) -> Hashable:
        """Take out the next to be evicted; raises LookupError where there is none."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Hashable]:
        """All items, the next to be evicted first."""


class Linked:
    """Least recently added first, in constant time: right where tails are added before heads."""

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, item: Hashable, time: int, depth: int, uses: int) -> None:
        self._items[item] = None

    def remove(self, item: Hashable) -> None:
        del self._items[item]

    def pop(self) -> Hashable:
        return self._items.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._items)


class Nested:
    """The report's heap of heaps: the oldest time first, among equal times the deepest.

    Equal in both go in the order in which they came. A removed item stays in its heap until it
    comes up, or until more are removed than left.
    """

    def __init__(self) -> None:
        self._times: list[int] = []
        self._heaps: dict[int, list[tuple[tuple[int, int, int], Hashable]]] = {}
        self._ranks: dict[Hashable, tuple[int, int, int]] = {}
        self._number = count()
        self._removed = 0

    def add(self, item: Hashable, time: int, depth: int, uses: int) -> None:
        rank = self._ranks[item] = (time, -depth, next(self._number))
        self._push(item, rank)

    def _push(self, item: Hashable, rank: tuple[int, int, int]) -> None:
        heap = self._heaps.get(rank[0])
        if heap is None:
            heap = self._heaps[rank[0]] = []
            heappush(self._times, rank[0])
        heappush(heap, (rank, item))

    def remove(self, item: Hashable) -> None:
        del self._ranks[item]
        self._removed += 1
        if self._removed > len(self._ranks) + SLACK:
            self._times, self._heaps, self._removed = [], {}, 0
            for other, rank in self._ranks.items():
                self._push(other, rank)

    def pop(self) -> Hashable:
        while True:
            heap = self._heaps[self._times[0]]
            while heap:
                rank, item = heappop(heap)
                if self._ranks.get(item) == rank:
                    del self._ranks[item]
                    return item
                self._removed -= 1
            del self._heaps[heappop(self._times)]

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(sorted(self._ranks, key=self._ranks.__getitem__))


class Frequency:
    """Least often used first, then the oldest time, then the deepest."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int, int], Hashable]] = []
        self._ranks: dict[Hashable, tuple[int, int, int, int]] = {}
        self._number = count()

    def add(self, item: Hashable, time: int, depth: int, uses: int) -> None:
        rank = self._ranks[item] = (uses, time, -depth, next(self._number))
        heappush(self._heap, (rank, item))

    def remove(self, item: Hashable) -> None:
        del self._ranks[item]
        if len(self._heap) > 2 * len(self._ranks) + SLACK:
            self._heap = [(rank, other) for other, rank in self._ranks.items()]
            heapify(self._heap)

    def pop(self) -> Hashable:
        while True:
            rank, item = heappop(self._heap)
            if self._ranks.get(item) == rank:
                del self._ranks[item]
                return item

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(sorted(self._ranks, key=self._ranks.__getitem__))


ORDERS = {"linked": Linked, "nested": Nested, "frequency": Frequency}
