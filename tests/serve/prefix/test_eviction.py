"""Eviction orders, alone and in a pool."""

from __future__ import annotations

import random
from itertools import count

import pytest

from jaxkv.serve.prefix import BlockPool
from jaxkv.serve.prefix.eviction import LFU, LRU, LRUDeepestFirst
from tests.serve.prefix.prompts import match, serve


def drain(order):
    return [order.pop() for _ in range(len(order))]


def fill(order, times):
    """Add prompt A of two blocks, then prompt B of three, each from its last block to its first."""
    for name, blocks in (("A", 2), ("B", 3)):
        time = next(times)
        for depth in reversed(range(blocks)):
            order.add(f"{name}{depth}", time, depth, 1)
    return order


def test_equal_times_distinguish_heap_from_list():
    """Behaviour 12: with equal times a heap orders by depth, a list by insertion."""
    by_list = ["A1", "A0", "B2", "B1", "B0"]
    assert drain(fill(LRUDeepestFirst(), iter([5, 5]))) == ["B2", "A1", "B1", "A0", "B0"]
    assert drain(fill(LRU(), iter([5, 5]))) == by_list
    for order in (LRUDeepestFirst, LRU, LFU):
        assert drain(fill(order(), count())) == by_list


@pytest.mark.parametrize("order", [LRU, LRUDeepestFirst, LFU])
def test_an_order_contains_what_was_added(order):
    entries = fill(order(), count())
    assert len(entries) == 5 and list(entries) == ["A1", "A0", "B2", "B1", "B0"]
    entries.remove("A0")
    with pytest.raises(KeyError):
        entries.remove("A0")
    assert [entries.pop(), len(entries), entries.pop()] == ["A1", 3, "B2"]
    entries.add("A0", 9, 0, 1)
    assert list(entries) == drain(entries) == ["B1", "B0", "A0"]
    with pytest.raises(LookupError):
        entries.pop()


def test_heap_and_list_pop_the_same():
    """Behaviour 13: over 100,000 operations. No two releases have the same time."""
    rng, times = random.Random(0), count()
    heap, in_list, inside, free = LRUDeepestFirst(), LRU(), set(), list(range(3000))
    operations = pops = 0
    while operations < 100_000:
        kind = rng.random()
        if kind < 0.3:  # a request is released, its last block first
            time = next(times)
            for depth in reversed(range(min(rng.randint(1, 8), len(free)))):
                item = free.pop()
                heap.add(item, time, depth, 1)
                in_list.add(item, time, depth, 1)
                inside.add(item)
                operations += 1
        elif inside:
            if kind < 0.6:  # a block is used again
                item = inside.pop()
                heap.remove(item)
                in_list.remove(item)
            else:
                item = heap.pop()
                assert in_list.pop() == item
                inside.remove(item)
                pops += 1
            free.append(item)
            operations += 1
    assert list(heap) == list(in_list) and len(heap) == len(inside)
    assert pops > 20_000


def test_a_heap_does_not_grow_with_removed_items():
    for order in (LRUDeepestFirst(), LFU()):
        for time in range(10_000):
            order.add("stays" if not time else "used", time, 0, 1)
            if time:
                order.remove("used")
        heaps = [order._heap] if isinstance(order, LFU) else order._heaps.values()
        assert sum(map(len, heaps)) < 200
        assert drain(order) == ["stays"]


def test_inserting_before_evicting_keeps_chains_whole():
    """Behaviour 9: in either insertion order, the first blocks of a chain stay."""
    for capacity in (0, 1, 2, 3):
        for depths in ([0, 1, 2, 3], [3, 2, 1, 0]):
            heap = LRUDeepestFirst()
            for depth in depths:
                heap.add(depth, 7, depth, 1)
                if len(heap) > capacity:
                    heap.pop()
            assert sorted(heap) == list(range(capacity))
    heap = LRUDeepestFirst()
    for depth in [0, 1, 2, 3]:  # evicting before inserting would cut the chain
        if len(heap) == 2:
            heap.pop()
        heap.add(depth, 7, depth, 1)
    assert sorted(heap) == [0, 3]


def test_lfu_evicts_the_most_used_last():
    """Behaviour 17: LFU orders by number of uses, then by time of last use, then by depth."""
    order = LFU()
    for item, time, depth, uses in (("often", 1, 3, 9), ("new", 8, 1, 2), ("deep", 4, 2, 2),
                                    ("shallow", 4, 1, 2), ("once", 9, 0, 1)):  # fmt: skip
        order.add(item, time, depth, uses)
    assert list(order) == drain(order) == ["once", "deep", "shallow", "new", "often"]


def test_lfu_keeps_the_most_used_prefix_in_a_pool():
    """Behaviour 17: LFU keeps the most used prefix; the other orders keep the most recent one."""
    matched = {}
    for order in ("lfu", "lru", "lru-deepest-first"):
        pool = BlockPool(4, num_blocks=4, order=order, cap=False)
        often, recent, unused = (list(range(n, n + 8)) for n in (0, 100, 200))
        for prompt in (often, often, often, recent, unused):
            serve(pool, prompt)
        matched[order] = [match(pool, prompt).matched for prompt in (often, recent)]
    assert matched == {"lfu": [8, 0], "lru": [0, 8], "lru-deepest-first": [0, 8]}
