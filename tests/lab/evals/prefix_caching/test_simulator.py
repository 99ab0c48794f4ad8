"""The report's index: behaviours 4, 9 and 13 of the reference."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.evals.prefix_caching.simulator import HASHINGS, MODES, Simulator
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


def refs(table):
    return [block.refs for block in table.blocks]


@pytest.mark.parametrize("capacity", [3, 12])
def test_13_the_engine_evicts_as_the_report(capacity):
    """As a naive index: the oldest first, of one time the longest prefix."""
    rng = random.Random(0)
    simulator = Simulator(2, capacity, "full")
    index, naive = PrefixIndex(2, [capacity], linked=True), Naive(2, capacity)
    for _ in range(2000):
        tokens = [rng.randrange(4), *(rng.randrange(2) for _ in range(rng.randrange(12)))]
        held = naive.hold(ROOT, tokens)
        last = (len(tokens) - 1) // 2 * 2  # the engine computes at least one token
        assert min(serve(simulator, tokens), last) == serve_index(index, tokens).start
        while len(held) < len(tokens) // 2 and naive.save(held, ROOT, tokens):
            pass
        naive.release(held)
        lru = index.tiers[0].lru
        assert [block.hashes[0] for block in simulator.cached] == [block.hash for block in lru]
        assert [block.boundary for block in lru] == [len(prefix) - 1 for prefix in naive.unused()]
    assert index.counts.evictions == naive.evictions > 1000


@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_09_heads_stay_cached(capacity):
    """Evicting before inserting would cut the chain."""
    index = Simulator(4, capacity, "full")
    table = admit(index, [*P[:12], 1, 2, 3, 4])
    assert serve(index, [*P[:12], 9]) == 12  # shares blocks in use, even with no capacity
    index.release(table)
    assert list(index.cached) == table.blocks[:capacity][::-1]


def test_04_a_shared_tail_is_copied():
    index = Simulator(4)
    first = admit(index, P)
    append(index, first, 1)
    second = admit(index, P)
    assert second.cached == 14 and second.blocks[3] is not first.blocks[3]
    assert refs(first) == [2, 2, 2, 1]


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
        counts.append((index.blocks, index.blocks_hit, len(index.entries)))
    assert counts[0] == counts[1]
