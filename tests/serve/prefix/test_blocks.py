"""Blocks: behaviours 3, 8, 9, 21, 23, 24, 28 and 35 of the reference."""

from __future__ import annotations

import pytest

from jaxkv.errors import UserError
from jaxkv.serve.prefix import root_hash
from tests.serve.prefix.prompts import (
    ROOT,
    P,
    admit,
    blocks,
    cached,
    missed,
    places,
    refs,
    serve,
    unused,
)


def test_03_the_last_token_is_always_computed():
    index = blocks()
    lease = serve(index, P[:12])
    again = admit(index, P[:12])
    assert again.start == cached(index, P[:12]) == 8
    assert places(again) == places(lease), "the last block is found when it is stored again"
    index = blocks(chunk=1)
    serve(index, P[:1])
    assert serve(index, P[:1]).start == 0


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_09_heads_stay_cached(capacity):
    """Behaviour 8 too: tails are evicted before heads."""
    index = blocks(4)
    lease = serve(index, [*P[:12], 1, 2, 3, 4, 5])
    serve(index, range(4 * (4 - capacity)))
    assert cached(index, [*P[:12], 1, 2, 3, 4, 5]) == 4 * capacity
    assert index.counts.evictions == 4 - capacity and lease.entries[0].ready


def test_21_equal_hashes_are_not_equal_tokens():
    index = blocks(hash=lambda data: b"same")
    first = admit(index, P[:4])
    assert missed(index, range(8)) == {"collision": 8}
    second = admit(index, range(8))
    assert second.start == 0 and not second.entries, "the first entry stays"
    assert cached(index, [*P[:4], 9]) == 4 and len(index) == 1
    # Roots are compared too, although all hashes are equal.
    assert cached(index, P[:5], root_hash(salt="x")) == 0
    assert refs(first) == [1]


def test_21_parents_are_compared():
    """The second block has the requested tokens and hash, but another parent."""
    index = blocks(2, chunk=1, hash=lambda data: data[-4:])
    serve(index, [1, 2, 0], save=(1, 2))
    assert cached(index, [1, 2, 0]) == 2
    serve(index, [3, 2, 0], save=(1, 2))  # 2 was evicted for 3, then 1 for 2
    assert cached(index, [3, 2, 0]) == 2 and cached(index, [1, 2, 0]) == 0
    assert missed(index, [4, 2, 0]) == {"cold": 2, "collision": 1}


def test_23_blocks_computed_twice_are_stored_once():
    index = blocks()
    prompt = index.hash_prompt(P, ROOT)
    first, second = index.hold(prompt), index.hold(prompt)
    for lease in (first, second):
        index.start(lease)
    for boundary in (4, 8, 12):
        index.publish(index.claim(prompt, boundary, first), first)
        assert index.claim(prompt, boundary, second) is None
    assert places(second) == places(first) and refs(first) == [2, 2, 2]
    assert second.start == 0 and index.counts.tokens_hit == 0
    index.release(first)
    index.release(second)
    assert len(index) == len(unused(index)) == 3


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


def test_28_tokens_evicted_long_ago_count_as_cold():
    index = blocks(1, chunk=1, history=4)
    for token in range(11):
        serve(index, [token])
    reasons = [next(iter(missed(index, [token]))) for token in range(10)]
    assert reasons[:6] == ["cold"] * 6 and reasons[8:] == ["evicted"] * 2


def test_35_reset_and_double_release():
    index = blocks(8)
    lease = admit(index, P)
    assert not index.reset() and cached(index, P) == 12
    index.release(lease)
    with pytest.raises(RuntimeError, match="released before"):
        index.release(lease)
    assert index.reset()
    assert (len(index), index.tiers[0].taken) == (0, 0)
    assert missed(index, P) == {"cold": 12, "tail": 2}
    assert sorted(places(admit(index, range(33)))) == list(range(8))


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
