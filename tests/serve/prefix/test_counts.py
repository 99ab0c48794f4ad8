"""The counts of a pool of blocks: behaviours 26 to 28 of the reference."""

from __future__ import annotations

import pytest

from jaxkv.serve.prefix import BlockPool
from tests.serve.prefix.prompts import ROOT, P, admit, match, serve


def test_26_counts_of_two_equal_requests():
    pool = BlockPool(4, mode="full")
    serve(pool, P, new=range(30))  # only the first lookup counts
    serve(pool, P)
    lookups = pool.counts.lookups
    assert (lookups.tokens_hit, lookups.tokens) == (12, 28)
    assert (lookups.full_blocks_hit, lookups.full_blocks) == (3, 6)
    assert (lookups.blocks_hit, lookups.blocks) == (3, 8)
    assert (lookups.requests_hit, lookups.requests) == (1, 2)


def test_27_a_request_counts_once():
    pool = BlockPool(4, num_blocks=4, mode="full")
    first, prompt = admit(pool, P), pool.hash_prompt([1, *P[1:]], ROOT)
    for _ in range(5):
        assert pool.admit(prompt) is None
    assert pool.counts.lookups.requests == 1
    pool.release(first)
    second = pool.admit(prompt)
    assert pool.counts.lookups.requests == 2
    pool.publish(second)
    pool.release(second)


@pytest.mark.parametrize(
    "mode, tokens, missed",
    [
        ("full", P, {"tail": 2}),
        ("full", P[:12], {"last_token": 4}),
        ("full", [*P[:12], 1, 2, 3, 4, 5], {"cold": 4, "tail": 1}),
        ("alias", P, {"last_token": 1}),
        ("alias", P[:13], {"cold": 1}),
        ("alias", [1, *P[1:]], {"cold": 14}),
        ("rekey", P, {"last_token": 1}),
        ("alias", [*range(900, 914), 1], {"evicted": 12, "cold": 3}),
        ("full", range(900, 914), {"evicted": 12, "tail": 2}),
    ],
)
def test_28_every_missed_token_has_one_reason(mode, tokens, missed):
    pool = BlockPool(4, mode=mode)
    serve(pool, range(900, 914))
    while pool.cached:
        pool._pages.evict()
    serve(pool, P)
    matched = match(pool, tokens)
    assert matched.missed == missed
    assert sum(missed.values()) + matched.usable == len(tokens)


def test_28_tokens_evicted_long_ago_count_as_cold():
    pool = BlockPool(1, capacity=0, mode="full", ghosts=4)
    for token in range(10):
        serve(pool, [token])
    reasons = [next(iter(match(pool, [token]).missed)) for token in range(10)]
    assert reasons[:6] == ["cold"] * 6 and reasons[8:] == ["evicted"] * 2


def test_a_block_copied_and_then_shared_counts_one_use():
    """Otherwise the last block would count more uses than its parents and outlive them."""
    pool = BlockPool(4, order="lfu")
    for _ in range(4):
        serve(pool, P[:12])
    for num_matched in (8, 4, 0):
        pool._pages.evict()
        assert match(pool, P[:12]).matched == num_matched
