"""Snapshots: behaviours 28 and 33 of the reference; two tiers."""

from __future__ import annotations

import pytest

from jaxkv.errors import UserError
from tests.serve.prefix.prompts import ROOT, cached, drop, missed, serve, snapshots


def test_33_the_second_prompt_saves_the_branch_point():
    index = snapshots(8, 4)
    common = list(range(20))
    first = serve(index, [*common, *range(100, 107)])
    assert (first.start, first.save) == (0, (24,))
    second = serve(index, [*common, *range(200, 211)])
    assert (second.start, second.save) == (0, (20, 28))
    third = serve(index, [*common, 300])
    assert (third.start, third.save) == (20, ())
    assert serve(index, common).start == 0  # one token must be computed


@pytest.mark.parametrize(
    "where, saved",
    [
        ("last", [(24,), (28,)]),
        ("branch", [(), (20,)]),
        ("every=2", [(8, 16, 24), (24,)]),
        ("every=5+last", [(20, 24), (28,)]),
        ("every=100", [(), ()]),
    ],
)
def test_where_snapshots_are_saved(where, saved):
    index = snapshots(20, 4, where)
    prompts = [[*range(20), *range(100 * n, 100 * n + length)] for n, length in ((1, 7), (2, 9))]
    assert [serve(index, prompt).save for prompt in prompts] == saved


def test_only_use_makes_a_snapshot_recent():
    index = snapshots(2, 4, "every=1")
    serve(index, range(9))  # 4 and 8, in this order
    serve(index, [*range(4), 100])
    serve(index, range(200, 205))
    assert cached(index, [*range(4), 100]) == 4 and cached(index, range(9)) == 4
    serve(index, range(200, 205))
    serve(index, range(300, 305))
    assert cached(index, range(9)) == 0


@pytest.mark.parametrize(
    "tokens, reasons",
    [
        (range(16), {"last_token": 8}),  # a snapshot at 16 cannot be used; it resumes from 8
        ([*range(16), 1, 2], {"tail": 2}),
        ([*range(12), 1, 2, 3, 4, 5], {"no_snapshot": 4, "cold": 4, "tail": 1}),
        (range(50, 60), {"cold": 8, "tail": 2}),
        ([*range(100, 108), 1], {"evicted": 8, "tail": 1}),
        (range(100, 108), {"evicted": 8}),
        ([*range(100, 104), 1], {"evicted": 4, "tail": 1}),
    ],
)
def test_28_every_missed_token_has_one_reason(tokens, reasons):
    index = snapshots(8, 4, "last")
    serve(index, [*range(100, 108), 1], save=(4, 8))
    for hash in index.hash_prompt(range(100, 108), ROOT).hashes:
        drop(index, hash)
    serve(index, [*range(16), 20, 21], save=(8, 16))
    hit = cached(index, tokens)
    assert missed(index, tokens) == reasons and sum(reasons.values()) + hit == len(tokens)


def test_branch_points_are_found_while_they_are_remembered():
    for history, saved in ((2**10, (20, 24)), (4, (24,))):
        index = snapshots(8, 4, history=history)
        serve(index, range(27))
        serve(index, range(500, 540))
        assert serve(index, [*range(20), *range(700, 707)]).save == saved


def test_snapshots_evicted_from_the_device_move_to_the_host_and_back():
    moves = []
    index = snapshots(1, 4, "last", host=2, move=lambda *places: moves.append(places))
    device, host = index.tiers
    prompts = [range(n, n + 5) for n in (0, 10, 20, 30)]
    for prompt in prompts[:3]:
        serve(index, prompt)
    assert moves == [(0, 0, 1, 0), (0, 0, 1, 1)]
    assert [cached(index, prompt) for prompt in prompts[:3]] == [4] * 3
    moves.clear()
    serve(index, prompts[3])  # the host is full, so the least recently used is evicted
    assert moves == [(0, 0, 1, 0)]
    assert [cached(index, prompt) for prompt in prompts] == [0, 4, 4, 4]
    assert index.counts.evictions == 1
    moves.clear()
    lease = index.hold(index.hash_prompt(prompts[1], ROOT))  # on the host, in place 1
    # The host has no third place for the exchange, so its other snapshot is evicted.
    assert moves == [(0, 0, 1, 0), (1, 1, 0, 0)]
    assert (lease.entries[0].index, device.taken, host.taken) == (0, 1, 1)
    assert [cached(index, prompt) for prompt in prompts] == [0, 4, 0, 4]
    moves.clear()
    # The only place of the device is being read, so no snapshot can return from the host.
    assert missed(index, prompts[3])["evicted"] == 4 and not moves
    index.release(lease)
    assert serve(index, prompts[3]).start == 4
    assert (index.counts.demotions, index.counts.promotions) == (5, 2)


def test_settings_are_checked(unchecked):
    for wrong in ({"capacity": 0}, {"chunk": 0}, {"where": "every=0"}, {"host": -1}):
        with pytest.raises(UserError, match="got"):
            snapshots(**{"capacity": 2, "chunk": 4} | wrong)
    index = snapshots(2, 4)
    for boundary in (0, 3, 12):
        with pytest.raises(UserError, match="boundary must be a multiple of 4"):
            index.claim(index.hash_prompt(range(9), ROOT), boundary)
