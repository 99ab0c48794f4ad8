"""Snapshots: behaviours 18, 20, 21, 24, 25, 27, 28 and 31 to 33 of the reference, and two tiers."""

from __future__ import annotations

import pytest

from jaxkv.errors import UserError
from jaxkv.prefix import Move, Snapshots, root

ROOT = root(policy="streaming")


def read(index, tokens, root=ROOT, save=None):
    """A prompt from beginning to end, with snapshots where it is planned or said; the visit."""
    visit = index.visit(index.read(tokens, root))
    for boundary in visit.save if save is None else save:
        snapshot = index.claim(visit.prompt, boundary)
        if snapshot is not None:
            index.publish(snapshot)
    index.leave(visit)
    return visit


def at(index, tokens, root=ROOT):
    """The boundary that a prompt would resume from."""
    found = index.find(index.read(tokens, root))
    return 0 if found is None else found.boundary


def test_24_what_is_not_computed_cannot_be_found():
    index = Snapshots(4, 4)
    prompt = index.read(range(9), ROOT)
    snapshot = index.claim(prompt, 8)
    assert at(index, range(9)) == 0 and index.claim(prompt, 8) is None
    assert index.visit(prompt).save == ()  # somebody is at it
    index.publish(snapshot)
    assert at(index, range(9)) == 8


def test_25_what_was_given_up_is_not_found():
    index = Snapshots(2, 4, "every=1")
    visit = index.visit(index.read(range(9), ROOT))
    assert visit.save == (4, 8)
    index.publish(index.claim(visit.prompt, 4))
    second = index.claim(visit.prompt, 8)
    assert index.taken == 2
    index.abandon(second)  # cancelled
    index.leave(visit)
    assert index.taken == 1 and at(index, range(9)) == 4
    assert index.claim(visit.prompt, 8).slot == second.slot
    with pytest.raises(RuntimeError, match="left before"):
        index.leave(visit)


def test_31_the_deepest_one_that_leaves_a_token():
    index = Snapshots(4, 16, "every=1")
    tokens = list(range(32))
    read(index, [*tokens, 99])
    assert at(index, [*tokens[:31], 77, 78, 79]) == 16
    assert at(index, [*tokens, *range(50, 58)]) == 32
    assert at(index, tokens) == 16
    assert at(index, tokens[:16]) == 0
    assert at(index, tokens[:17]) == 16


def test_32_snapshots_stand_alone():
    index = Snapshots(4, 16, "every=1")
    prompt = index.read(range(33), ROOT)
    read(index, range(33))
    assert index.drop(prompt.keys[0]) and not index.drop(prompt.keys[0])
    assert at(index, range(33)) == 32
    assert at(index, range(32)) == 0
    visit = index.visit(prompt)
    assert not index.drop(prompt.keys[1])  # somebody reads it
    index.leave(visit)
    assert index.drop(prompt.keys[1])


def test_33_where_two_prompts_part_is_saved_when_the_second_comes():
    index = Snapshots(8, 4)
    common = list(range(20))
    first = read(index, [*common, *range(100, 107)])
    assert (first.at, first.save) == (0, (24,))
    second = read(index, [*common, *range(200, 211)])
    assert (second.at, second.save) == (0, (20, 28))
    third = read(index, [*common, 300])
    assert (third.at, third.save) == (20, ())
    assert read(index, common).at == 0  # one token must be computed


@pytest.mark.parametrize(
    "where, saved",
    [
        ("last", [(24,), (28,)]),
        ("junction", [(), (20,)]),
        ("branch", [(), (20,)]),
        ("every=2", [(8, 16, 24), (24,)]),
        ("every=5+last", [(20, 24), (28,)]),
        ("every=100", [(), ()]),
    ],
)
def test_rules(where, saved):
    index = Snapshots(20, 4, where)
    prompts = [[*range(20), *range(100 * n, 100 * n + length)] for n, length in ((1, 7), (2, 9))]
    assert [read(index, prompt).save for prompt in prompts] == saved


def test_roots_keep_apart():
    index = Snapshots(4, 4)
    read(index, range(9), root(salt="a"))
    assert at(index, range(9), root(salt="b")) == at(index, range(9)) == 0
    assert at(index, range(9), root(salt="a")) == 8


def test_21_equal_keys_are_not_equal_tokens():
    index = Snapshots(4, 4, hash=lambda data: b"same")
    read(index, range(5))
    visit = read(index, range(10, 15))
    assert (visit.at, visit.save) == (0, ())  # the first entry is kept
    assert index.counts.first.missed["collision"] == 4
    assert at(index, range(5)) == 4


def test_only_what_was_used_becomes_new():
    index = Snapshots(2, 4, "every=1")
    read(index, range(9))  # 4 and 8, in this order
    read(index, [*range(4), 100])
    read(index, range(200, 205))
    assert at(index, [*range(4), 100]) == 4 and at(index, range(9)) == 4
    read(index, range(200, 205))
    read(index, range(300, 305))
    assert at(index, range(9)) == 0


def test_what_is_read_is_not_evicted():
    index = Snapshots(1, 4, "last")
    read(index, range(5))
    reader = index.visit(index.read(range(5), ROOT))
    other = index.read(range(10, 15), ROOT)
    assert reader.at == 4 and index.claim(other, 4) is None and not index.reset()
    index.leave(reader)
    assert index.claim(other, 4).slot == reader.snapshot.slot
    assert at(index, range(5)) == 0 and index.counts.evictions == 1
    assert not index.reset()  # a claim is open


def test_27_a_resumed_request_is_counted_apart():
    index = Snapshots(4, 4)
    read(index, range(9))
    again = index.visit(index.read(range(9), ROOT), resumed=True)
    assert again.at == 8 and index.counts.resumed.tokens_hit == 8
    assert index.counts.first.tokens_hit == 0


@pytest.mark.parametrize(
    "tokens, missed",
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
def test_28_each_token_is_found_or_has_one_reason(tokens, missed):
    index = Snapshots(8, 4, "last")
    read(index, [*range(100, 108), 1], save=(4, 8))
    for key in index.read(range(100, 108), ROOT).keys:
        index.drop(key)
    read(index, [*range(16), 20, 21], save=(8, 16))
    before = dict(index.counts.first.missed)
    visit = read(index, tokens, save=())
    after = index.counts.first.missed
    found = {reason: after[reason] - before[reason] for reason in after}
    assert {reason: count for reason, count in found.items() if count} == missed
    assert sum(missed.values()) + visit.at == len(tokens)


def test_junctions_are_found_as_long_as_they_are_remembered():
    for memory, saved in ((2**10, (20, 24)), (4, (24,))):
        index = Snapshots(8, 4, memory=memory)
        read(index, range(27))
        read(index, range(500, 540))
        assert read(index, [*range(20), *range(700, 707)]).save == saved


def test_what_falls_out_of_the_device_goes_to_the_host_and_comes_back():
    index = Snapshots(1, 4, "last", host_slots=2)
    prompts = [range(n, n + 5) for n in (0, 10, 20, 30)]
    for prompt in prompts[:3]:
        read(index, prompt)
    down = [Move("device", 0, "host", 0), Move("device", 0, "host", 1)]
    assert index.moves == down and [at(index, prompt) for prompt in prompts[:3]] == [4, 4, 4]
    index.moves.clear()
    read(index, prompts[3])  # the host is full: what was used least recently is lost
    assert index.moves == [Move("device", 0, "host", 0)]
    assert [at(index, prompt) for prompt in prompts] == [0, 4, 4, 4]
    assert index.counts.evictions == 1
    index.moves.clear()
    visit = index.visit(index.read(prompts[1], ROOT))  # at home on the host, in its slot 1
    # The host has no third slot to exchange them in, so the other one there is lost.
    assert index.moves == [Move("device", 0, "host", 0), Move("host", 1, "device", 0)]
    assert (visit.at, visit.snapshot.slot, index.taken, index.host_taken) == (4, 0, 1, 1)
    assert [at(index, prompt) for prompt in prompts] == [0, 4, 0, 4]
    index.moves.clear()
    # All of the device is read: what is on the host cannot come back now.
    blocked = index.visit(index.read(prompts[3], ROOT))
    assert (blocked.at, index.moves) == (0, [])
    assert index.counts.first.missed["evicted"] == 4
    index.leave(visit)
    index.leave(blocked)
    assert index.visit(index.read(prompts[3], ROOT)).at == 4
    assert (index.counts.demotions, index.counts.promotions) == (5, 2)


def test_a_host_of_one_slot_gives_way():
    index = Snapshots(1, 4, "last", host_slots=1)
    read(index, range(5))
    read(index, range(10, 15))
    index.moves.clear()
    visit = index.visit(index.read(range(5), ROOT))
    assert visit.at == 4 and index.moves == [Move("host", 0, "device", 0)]
    assert (index.taken, index.host_taken, index.counts.evictions) == (1, 0, 1)
    index.leave(visit)
    assert index.reset() and (index.taken, index.host_taken) == (0, 0)
    assert at(index, range(5)) == 0


def test_settings_are_checked(unchecked):
    for wrong in ({"slots": 0}, {"chunk": 0}, {"where": "first"}, {"where": ""}, {"memory": 1},
                  {"where": "every=0"}, {"where": "every"}, {"host_slots": -1},
                  {"slots": 1.5}, {"slots": True}, {"slots": "a"}, {"host_slots": 1.5},
                  {"memory": None}, {"where": None}):  # fmt: skip
        with pytest.raises(UserError, match="got"):
            Snapshots(**{"slots": 2, "chunk": 4} | wrong)
    index = Snapshots(2, 4)
    for boundary in (0, 3, 12):
        with pytest.raises(UserError, match="boundary must be a multiple of 4"):
            index.claim(index.read(range(9), ROOT), boundary)
    ready = index.claim(index.read(range(9), ROOT), 8)
    index.publish(ready)
    with pytest.raises(RuntimeError, match="cannot be abandoned"):
        index.abandon(ready)
