"""Eviction orders for prefix blocks that no request uses.

Each order takes an item with its time of last use, its depth (blocks before it in its prompt) and
its number of uses. If an item's ancestors have at least its time and its uses, every order evicts
the item before its ancestors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

SLACK = 64  # removed items that a heap may hold beyond one for each present item


class EvictionOrder(Protocol):
    """A priority queue of evictable items."""

    def add(self, item: Hashable, time: int, depth: int, uses: int) -> None:
        """Insert an item that is not present."""

    def remove(self, item: Hashable) -> None:
        """Remove an item; raises KeyError if it is not present."""

    def pop(self) -> Hashable:
        """Remove and return the next item to evict; raises LookupError if there is none."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Hashable]:
        """All items in eviction order."""


class LRU:
    """Evict the least recently added item first, in constant time.

    Callers must add the tail of a prompt before its head.
    """

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


class LRUDeepestFirst:
    """Evict the oldest time first, and the deepest item among equal times.

    This is the heap of heaps of the report. Ties leave in order of insertion. A removed item stays
    in its heap until it reaches the top, or until removed items outnumber present ones.
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
            for candidate, rank in self._ranks.items():
                self._push(candidate, rank)

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


class LFU:
    """Evict the least often used item first, then the oldest, then the deepest."""

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
            self._heap = [(rank, candidate) for candidate, rank in self._ranks.items()]
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


ORDERS = {"lru": LRU, "lru-deepest-first": LRUDeepestFirst, "lfu": LFU}
