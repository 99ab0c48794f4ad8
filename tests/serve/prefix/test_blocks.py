"""Blocks: behaviours 24 and 28 of the reference."""

from __future__ import annotations

import pytest

from jaxkv.errors import UserError
from tests.serve.prefix.prompts import (
    ROOT,
    P,
    admit,
    blocks,
    cached,
    missed,
    refs,
    serve,
    snapshots,
)


def test_24_a_block_is_found_only_when_published():
    index = blocks()
    prompt = index.hash_prompt(P, ROOT)
    first, second = index.hold(prompt), index.hold(prompt)
    block = index.claim(prompt, 4, first)
    assert cached(index, P) == 0 and index.claim(prompt, 4, second) is None
    index.publish(block, first)
    assert cached(index, P) == 4


@pytest.mark.parametrize(
    "tokens, reasons",
    [
        (P, {"tail": 2}),
        (P[:12], {"last_token": 4}),
        ([*P[:12], 1, 2, 3, 4, 5], {"cold": 4, "tail": 1}),
        (range(900, 914), {"evicted": 12, "tail": 2}),
    ],
)
def test_28_every_missed_token_has_one_reason(tokens, reasons):
    index = blocks(3)
    serve(index, range(900, 914))
    serve(index, P)
    hit = cached(index, tokens)
    assert missed(index, tokens) == reasons and sum(reasons.values()) + hit == len(tokens)


@pytest.mark.parametrize("make", [blocks, snapshots])
def test_28_equal_hashes_of_other_tokens_are_a_collision(make):
    index = make(hash=lambda data: b"same")
    serve(index, range(5))
    assert missed(index, range(10, 15)) == {"collision": 4, "tail": 1}


def test_28_tokens_evicted_long_ago_count_as_cold():
    index = blocks(1, chunk=1, history=4)
    for token in range(11):
        serve(index, [token])
    reasons = [next(iter(missed(index, [token]))) for token in range(10)]
    assert reasons[:6] == ["cold"] * 6 and reasons[8:] == ["evicted"] * 2


def test_blocks_return_from_the_host():
    """The head first, because a tail without its head is of no use."""
    moves = []
    index = blocks(3, move=lambda *places: moves.append(places))
    index._capacities = (3, 9)
    assert index.reset()
    serve(index, P)
    serve(index, range(14))
    assert moves == [(0, 2, 1, 0), (0, 1, 1, 1), (0, 0, 1, 2)]
    assert cached(index, P) == 12 and index.counts.demotions == 3
    other = admit(index, range(5))  # one place of the device is in use
    lease = admit(index, P)
    assert lease.start == 8 and not any(entry.level for entry in lease.entries)
    assert missed(index, P)["evicted"] == 4 and index.counts.promotions == 2
    assert (index.in_use, refs(lease), refs(other)) == (3, [1, 1], [1])


def test_settings_are_checked(unchecked):
    for wrong in ({"capacity": 0}, {"capacity": -1}, {"chunk": 0}, {"history": 1}):
        with pytest.raises(UserError, match="got"):
            blocks(**wrong)
