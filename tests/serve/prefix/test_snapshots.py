"""Snapshots: behaviours 18, 20, 21, 24, 25, 27, 28 and 31 to 33 of the reference; two tiers."""

from __future__ import annotations

import pytest

from jaxkv.errors import UserError
from jaxkv.serve.prefix import Snapshots, Transfer, root_hash
from tests.serve.prefix.prompts import drop_snapshot

ROOT = root_hash(policy="streaming")


def prefill(index, tokens, root=ROOT, save=None):
    """Prefill a prompt and store the planned snapshots, or those in `save`; returns the plan."""
    plan = index.plan_prefill(index.hash_prompt(tokens, root))
    for boundary in plan.save if save is None else save:
        snapshot = index.claim(plan.prompt, boundary)
        if snapshot is not None:
            index.publish(snapshot)
    index.release(plan)
    return plan


def resume_at(index, tokens, root=ROOT):
    """The boundary from which a prompt would resume."""
    snapshot_match = index.find(index.hash_prompt(tokens, root))
    return 0 if snapshot_match is None else snapshot_match.boundary


def test_24_a_snapshot_is_found_only_when_published():
    index = Snapshots(4, 4)
    prompt = index.hash_prompt(range(9), ROOT)
    snapshot = index.claim(prompt, 8)
    assert resume_at(index, range(9)) == 0 and index.claim(prompt, 8) is None
    assert index.plan_prefill(prompt).save == ()  # another request computes it
    index.publish(snapshot)
    assert resume_at(index, range(9)) == 8


def test_25_a_cancelled_request_leaves_only_published_snapshots():
    index = Snapshots(2, 4, "every=1")
    plan = index.plan_prefill(index.hash_prompt(range(9), ROOT))
    assert plan.save == (4, 8)
    index.publish(index.claim(plan.prompt, 4))
    index.release(plan)  # cancelled
    assert index.taken == 1 and resume_at(index, range(9)) == 4
    with pytest.raises(RuntimeError, match="released before"):
        index.release(plan)


def test_31_prefill_resumes_from_the_deepest_snapshot_that_leaves_a_token():
    index = Snapshots(4, 16, "every=1")
    tokens = list(range(32))
    prefill(index, [*tokens, 99])
    assert resume_at(index, [*tokens[:31], 77, 78, 79]) == 16
    assert resume_at(index, [*tokens, *range(50, 58)]) == 32
    assert resume_at(index, tokens) == 16
    assert resume_at(index, tokens[:16]) == 0
    assert resume_at(index, tokens[:17]) == 16


def test_32_a_snapshot_needs_no_earlier_one():
    index = Snapshots(4, 16, "every=1")
    prompt = index.hash_prompt(range(33), ROOT)
    prefill(index, range(33))
    assert drop_snapshot(index, prompt.hashes[0]) and not drop_snapshot(index, prompt.hashes[0])
    assert resume_at(index, range(33)) == 32
    assert resume_at(index, range(32)) == 0
    plan = index.plan_prefill(prompt)
    assert not drop_snapshot(index, prompt.hashes[1])  # it has a reader
    index.release(plan)
    assert drop_snapshot(index, prompt.hashes[1])


def test_33_the_second_prompt_saves_the_branch_point():
    index = Snapshots(8, 4)
    common = list(range(20))
    first = prefill(index, [*common, *range(100, 107)])
    assert (first.start, first.save) == (0, (24,))
    second = prefill(index, [*common, *range(200, 211)])
    assert (second.start, second.save) == (0, (20, 28))
    third = prefill(index, [*common, 300])
    assert (third.start, third.save) == (20, ())
    assert prefill(index, common).start == 0  # one token must be computed


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
    index = Snapshots(20, 4, where)
    prompts = [[*range(20), *range(100 * n, 100 * n + length)] for n, length in ((1, 7), (2, 9))]
    assert [prefill(index, prompt).save for prompt in prompts] == saved


def test_different_roots_share_no_snapshots():
    index = Snapshots(4, 4)
    prefill(index, range(9), root_hash(salt="a"))
    assert resume_at(index, range(9), root_hash(salt="b")) == resume_at(index, range(9)) == 0
    assert resume_at(index, range(9), root_hash(salt="a")) == 8


def test_21_equal_hashes_are_not_equal_tokens():
    index = Snapshots(4, 4, hash=lambda data: b"same")
    prefill(index, range(5))
    plan = prefill(index, range(10, 15))
    assert (plan.start, plan.save) == (0, ())  # the first entry stays
    assert index.counts.lookups.missed["collision"] == 4
    assert resume_at(index, range(5)) == 4


def test_only_use_makes_a_snapshot_recent():
    index = Snapshots(2, 4, "every=1")
    prefill(index, range(9))  # 4 and 8, in this order
    prefill(index, [*range(4), 100])
    prefill(index, range(200, 205))
    assert resume_at(index, [*range(4), 100]) == 4 and resume_at(index, range(9)) == 4
    prefill(index, range(200, 205))
    prefill(index, range(300, 305))
    assert resume_at(index, range(9)) == 0


def test_a_snapshot_being_read_is_not_evicted():
    index = Snapshots(1, 4, "last")
    prefill(index, range(5))
    reader = index.plan_prefill(index.hash_prompt(range(5), ROOT))
    new_prompt = index.hash_prompt(range(10, 15), ROOT)
    assert reader.start == 4 and index.claim(new_prompt, 4) is None and not index.reset()
    index.release(reader)
    assert index.claim(new_prompt, 4).index == reader.snapshot.index
    assert resume_at(index, range(5)) == 0 and index.counts.evictions == 1
    assert not index.reset()  # a claim is open


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
def test_28_every_missed_token_has_one_reason(tokens, missed):
    index = Snapshots(8, 4, "last")
    prefill(index, [*range(100, 108), 1], save=(4, 8))
    for hash in index.hash_prompt(range(100, 108), ROOT).hashes:
        drop_snapshot(index, hash)
    prefill(index, [*range(16), 20, 21], save=(8, 16))
    before = dict(index.counts.lookups.missed)
    plan = prefill(index, tokens, save=())
    after = index.counts.lookups.missed
    missed_now = {reason: after[reason] - before[reason] for reason in after}
    assert {reason: count for reason, count in missed_now.items() if count} == missed
    assert sum(missed.values()) + plan.start == len(tokens)


def test_branch_points_are_found_while_they_are_remembered():
    for history, saved in ((2**10, (20, 24)), (4, (24,))):
        index = Snapshots(8, 4, history=history)
        prefill(index, range(27))
        prefill(index, range(500, 540))
        assert prefill(index, [*range(20), *range(700, 707)]).save == saved


def test_snapshots_evicted_from_the_device_move_to_the_host_and_back():
    index = Snapshots(1, 4, "last", host_capacity=2)
    prompts = [range(n, n + 5) for n in (0, 10, 20, 30)]
    for prompt in prompts[:3]:
        prefill(index, prompt)
    down = [Transfer("device", 0, "host", 0), Transfer("device", 0, "host", 1)]
    assert index.transfers == down
    assert [resume_at(index, prompt) for prompt in prompts[:3]] == [4] * 3
    index.transfers.clear()
    prefill(index, prompts[3])  # the host is full, so the least recently used is evicted
    assert index.transfers == [Transfer("device", 0, "host", 0)]
    assert [resume_at(index, prompt) for prompt in prompts] == [0, 4, 4, 4]
    assert index.counts.evictions == 1
    index.transfers.clear()
    plan = index.plan_prefill(index.hash_prompt(prompts[1], ROOT))  # on the host, in entry 1
    # The host has no third entry for the exchange, so its other snapshot is evicted.
    assert index.transfers == [Transfer("device", 0, "host", 0), Transfer("host", 1, "device", 0)]
    assert (plan.start, plan.snapshot.index, index.taken, index.host_taken) == (4, 0, 1, 1)
    assert [resume_at(index, prompt) for prompt in prompts] == [0, 4, 0, 4]
    index.transfers.clear()
    # The only device entry is being read, so no snapshot can return from the host.
    blocked = index.plan_prefill(index.hash_prompt(prompts[3], ROOT))
    assert (blocked.start, index.transfers) == (0, [])
    assert index.counts.lookups.missed["evicted"] == 4
    index.release(plan)
    index.release(blocked)
    assert index.plan_prefill(index.hash_prompt(prompts[3], ROOT)).start == 4
    assert (index.counts.demotions, index.counts.promotions) == (5, 2)


def test_a_full_host_of_one_entry_swaps_with_the_device():
    index = Snapshots(1, 4, "last", host_capacity=1)
    prefill(index, range(5))
    prefill(index, range(10, 15))
    index.transfers.clear()
    plan = index.plan_prefill(index.hash_prompt(range(5), ROOT))
    assert plan.start == 4 and index.transfers == [Transfer("host", 0, "device", 0)]
    assert (index.taken, index.host_taken, index.counts.evictions) == (1, 0, 1)
    index.release(plan)
    assert index.reset() and (index.taken, index.host_taken) == (0, 0)
    assert resume_at(index, range(5)) == 0


def test_settings_are_checked(unchecked):
    for wrong in ({"capacity": 0}, {"chunk": 0}, {"where": "first"}, {"where": ""}, {"history": 1},
                  {"where": "every=0"}, {"where": "every"}, {"host_capacity": -1},
                  {"capacity": 1.5}, {"capacity": True}, {"capacity": "a"}, {"host_capacity": 1.5},
                  {"history": None}, {"where": None}):  # fmt: skip
        with pytest.raises(UserError, match="got"):
            Snapshots(**{"capacity": 2, "chunk": 4} | wrong)
    index = Snapshots(2, 4)
    for boundary in (0, 3, 12):
        with pytest.raises(UserError, match="boundary must be a multiple of 4"):
            index.claim(index.hash_prompt(range(9), ROOT), boundary)
