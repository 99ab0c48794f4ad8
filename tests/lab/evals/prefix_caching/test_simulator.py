"""The report's index: behaviours 4 to 6, 9, 12, 13, 16, 17, 21, 23, 26 and 28 of the reference."""

from __future__ import annotations

import random
from itertools import count, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.evals.prefix_caching.simulator import HASHINGS, MODES, ORDERS, Simulator
from jaxkv.serve.prefix import PrefixIndex
from tests.serve.prefix.naive import Naive
from tests.serve.prefix.prompts import ROOT, P
from tests.serve.prefix.prompts import serve as serve_index


def admit(index, tokens):
    table = index.admit(index.hash_prompt(tokens, ROOT))
    index.publish(table)
    return table


def append(index, table, *tokens):
    for token in tokens:
        index.append(table, token)
        index.publish(table)


def serve(index, tokens, new=()):
    """Serve a whole request; returns the number of its tokens that were cached."""
    table = admit(index, tokens)
    append(index, table, *new)
    index.release(table)
    return table.cached


def missed(index, tokens):
    """The tokens of a prompt that miss, by reason."""
    before = dict(index.lookups.missed)
    index.admit(index.hash_prompt(tokens, ROOT))
    counts = {reason: number - before[reason] for reason, number in index.lookups.missed.items()}
    return {reason: number for reason, number in counts.items() if number}


def matched(index, tokens):
    """Tokens of a prompt that are cached."""
    blocks, _ = index._walk(index.hash_prompt(tokens, ROOT))
    return min(len(blocks) * index.block_size, len(tokens))


def refs(table):
    return [block.refs for block in table.blocks]


@pytest.mark.parametrize("order", ["lru", "lru-deepest-first"])
@pytest.mark.parametrize("capacity", [3, 12])
def test_13_the_engine_evicts_as_the_report(order, capacity):
    """By heap and by list, as a naive index: the oldest first, of one time the longest prefix."""
    rng = random.Random(0)
    simulator = Simulator(2, capacity, "full", order)
    index, naive = PrefixIndex(2, [capacity], linked=True), Naive(2, capacity)
    for _ in range(2000):
        tokens = [rng.randrange(4), *(rng.randrange(2) for _ in range(rng.randrange(12)))]
        held = naive.hold(ROOT, tokens)
        assert serve(simulator, tokens) == serve_index(index, tokens).start == 2 * len(held)
        while len(held) < len(tokens) // 2 and naive.save(held, ROOT, tokens):
            pass
        naive.release(held)
        hashes = [block.hashes[0] for block in simulator.cached]
        assert hashes == [block.hash for block in index.tiers[0].lru]
        assert [block.depth for block in simulator.cached] == [
            len(prefix) // 2 - 1 for prefix in naive.unused()
        ]
    assert index.counts.evictions == naive.evictions > 1000


def drain(order):
    return [order.pop() for _ in range(len(order))]


def fill(order, times):
    """Add prompt A of two blocks, then prompt B of three, each from its last block to its first."""
    for name, blocks in (("A", 2), ("B", 3)):
        time = next(times)
        for depth in reversed(range(blocks)):
            order.add(f"{name}{depth}", time, depth)
    return order


def test_12_equal_times_distinguish_heap_from_list():
    """With equal times a heap orders by depth, a list by insertion."""
    by_list = ["A1", "A0", "B2", "B1", "B0"]
    deepest, lru = ORDERS["lru-deepest-first"], ORDERS["lru"]
    assert drain(fill(deepest(), iter([5, 5]))) == ["B2", "A1", "B1", "A0", "B0"]
    assert drain(fill(lru(), iter([5, 5]))) == by_list
    assert all(drain(fill(order(), count())) == by_list for order in ORDERS.values())
    index = Simulator(4, mode="full", order="lru-deepest-first", clock=repeat(5).__next__)
    tables = [admit(index, tokens) for tokens in (P[:8], range(12))]
    for table in tables:
        index.release(table)
    assert [block.depth for block in index.cached] == [2, 1, 1, 0, 0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_09_heads_stay_cached(order, capacity):
    """Evicting before inserting would cut the chain."""
    index = Simulator(4, capacity, "full", order)
    table = admit(index, [*P[:12], 1, 2, 3, 4])
    assert serve(index, [*P[:12], 9]) == 12  # shares blocks in use, even with no capacity
    index.release(table)
    assert sorted(block.depth for block in index.cached) == list(range(capacity))
    assert index.evictions == 4 - capacity


def test_04_a_shared_tail_is_copied():
    index = Simulator(4)
    first = admit(index, P)
    append(index, first, 1)
    second = admit(index, P)
    assert second.cached == 13 and second.blocks[3] is not first.blocks[3]
    assert refs(first) == [2, 2, 2, 1]
    third = index.admit(index.hash_prompt(P[:12], ROOT))  # a full last block is copied too
    assert third.cached == 11 and third.blocks[2] is not first.blocks[2]
    index.publish(third)
    assert third.blocks[2] is first.blocks[2] and index.duplicates == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hashing", HASHINGS)
def test_21_equal_hashes_are_not_equal_tokens(mode, hashing):
    index = Simulator(4, mode=mode, hashing=hashing, hash=lambda data: b"same")
    admit(index, P[:4])
    assert missed(index, range(8)) == {"collision": 8}
    second = admit(index, range(8))
    assert second.cached == 0 and len(index.entries) == 1  # the first entry stays
    index.release(second)
    assert not index.cached  # blocks that no lookup finds are not cached


@pytest.mark.parametrize(
    "mode, tokens, reasons",
    [
        ("full", P, {"tail": 2}),
        ("full", P[:12], {"last_token": 4}),
        ("full", range(900, 914), {"evicted": 12, "tail": 2}),
        ("alias", P, {"last_token": 1}),
        ("alias", P[:13], {"cold": 1}),
        ("alias", [1, *P[1:]], {"cold": 14}),
        ("rekey", P, {"last_token": 1}),
        ("alias", [*range(900, 914), 1], {"evicted": 12, "cold": 3}),
    ],
)
def test_28_every_missed_token_has_one_reason(mode, tokens, reasons):
    index = Simulator(4, mode=mode)
    serve(index, range(900, 914))
    while len(index.cached):
        index.evict()
    serve(index, P)
    assert missed(index, tokens) == reasons


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, database=None)
@given(prompts=PROMPTS, block=st.integers(1, 4), mode=st.sampled_from(MODES),
       capacity=st.none() | st.integers(0, 6))  # fmt: skip
def test_direct_and_chained_hashing_find_the_same(prompts, block, mode, capacity):
    counts = []
    for hashing in HASHINGS:
        index = Simulator(block, capacity, mode, hashing=hashing)
        for number, prompt in enumerate(prompts):
            serve(index, prompt, range(number % 4))
        counts.append((index.lookups, index.evictions, index.duplicates))
    assert counts[0] == counts[1]
