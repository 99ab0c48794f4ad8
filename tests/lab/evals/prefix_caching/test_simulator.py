"""The report's index: behaviours 4 to 6, 9, 12, 13, 16, 17, 21, 23, 26 and 28 of the reference."""

from __future__ import annotations

import random
from itertools import count, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.errors import UserError
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


def test_05_growth_changes_the_hash():
    index = Simulator(4, mode="rekey")
    table, grown = admit(index, P), [*P, 1, 2, 3]
    for size in (15, 16, 17):
        append(index, table, grown[size - 1])
        assert len(index.entries) == -(-size // 4)
        assert matched(index, P) == 12  # the hash of 14 tokens is gone
        assert matched(index, grown[:size]) == size


def test_05_an_alias_keeps_the_hash_of_the_prompt():
    index = Simulator(4)
    table = admit(index, P)
    for size in (15, 16, 17):
        append(index, table, size)
        assert matched(index, P) == 14
    assert matched(index, [*P, 15, 16, 17]) == 16  # what the next chat turn sends
    index.release(table)
    assert len(index.entries) == 5 and len(index.cached) == 4


def test_06_a_shared_tail_is_copied_before_a_write():
    index = Simulator(4, mode="rekey", cap=False)
    first, second = admit(index, P), admit(index, P)
    assert first.blocks == second.blocks and refs(first) == [2, 2, 2, 2]
    append(index, second, 1)
    assert second.blocks[3] is not first.blocks[3] and refs(first) == [2, 2, 2, 1]
    assert matched(index, P) == 14 and matched(index, [*P, 1]) == 15
    before = list(first.blocks)
    append(index, first, 2)  # no other request uses the tail now
    assert first.blocks == before


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


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("mode", ["alias", "rekey"])
def test_23_lookups_find_one_of_two_equal_tails(mode, later):
    index = Simulator(4, mode=mode)
    prompt = index.hash_prompt(P, ROOT)
    first, second = index.admit(prompt), index.admit(prompt)
    for table in (first, second):
        index.publish(table)
    assert second.blocks[:3] == first.blocks[:3] and second.blocks[3] is not first.blocks[3]
    for table in (second, first) if later else (first, second):
        append(index, table, 7, 8, 9)  # until the tails are full, and equal again
    assert second.blocks[:4] == first.blocks[:4]
    assert matched(index, P) == (14 if mode == "alias" else 12)
    index.release(first)
    index.release(second)
    assert len(index.cached) == len(index.entries) - (mode == "alias")  # two hashes of one block


def test_26_counts_of_two_equal_requests():
    index = Simulator(4, mode="full")
    serve(index, P, new=range(30))  # only the first lookup counts
    serve(index, P)
    lookups = index.lookups
    assert (lookups.tokens_hit, lookups.tokens) == (12, 28)
    assert (lookups.blocks_hit, lookups.blocks) == (3, 8)
    assert (lookups.requests_hit, lookups.requests) == (1, 2)


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


@pytest.mark.parametrize("order", ORDERS)
def test_copying_a_tail_counts_as_use(order):
    index = Simulator(4, order=order)
    first = admit(index, P)
    index.release(first)
    reader = admit(index, range(12))
    index.release(reader)
    serve(index, P)
    assert list(index.cached) == reader.blocks[::-1] + first.blocks[::-1]


@pytest.mark.parametrize(
    "wrong", [{"mode": "half"}, {"order": "random"}, {"hashing": "crc"}, {"capacity": -1},
              {"block_size": 0}],
)  # fmt: skip
def test_settings_are_checked(wrong):
    with pytest.raises(UserError, match="got"):
        Simulator(**{"block_size": 4} | wrong)


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
