"""The queue of requests: owners take turns, and what it counts stays right."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv.serve.engine import Engine, PrefixConfig, Request, RequestHandle
from jaxkv.serve.engine.queue import RequestQueue
from tests.serve.engine.plain import Recorder, ask, finish, plain


def waiting(owner: str | None, size: int = 1) -> RequestHandle:
    return RequestHandle(Request((1,) * size, 4, owner=owner), Recorder(), 0.0)


def test_owners_take_turns():
    queue = RequestQueue(100, 1000)
    greedy, modest = [waiting("greedy") for _ in range(4)], [waiting("other") for _ in range(2)]
    for handle in [*greedy, *modest]:
        queue.put(handle)
    order = [greedy[0], modest[0], greedy[1], modest[1], greedy[2], greedy[3]]
    assert list(queue) == order
    assert [queue.take() for _ in range(6)] == order and not queue and queue.tokens == 0


def test_an_owner_who_comes_back_waits_for_one_turn_of_each_other():
    queue = RequestQueue(100, 1000)
    for _ in range(3):
        queue.put(waiting("a"))
        queue.put(waiting("b"))
    queue.put(waiting("c"))
    assert [queue.take().request.owner for _ in range(3)] == ["a", "b", "c"]
    queue.put(waiting("c"))
    assert [queue.take().request.owner for _ in range(3)] == ["a", "b", "c"]


def test_random_calls_keep_the_counts():
    rng, queue, inside, cancelled = np.random.default_rng(0), RequestQueue(9, 99), [], 0
    for _ in range(3000):
        match int(rng.integers(5)):
            case 0 | 1:
                handle = waiting(str(rng.integers(4)), int(rng.integers(1, 9)))
                queue.put(handle)
                inside.append(handle)
            case 2 | 3 if inside:
                taken = queue.take()
                owner_handles = [
                    handle for handle in inside if handle.request.owner == taken.request.owner
                ]
                assert taken is owner_handles[0], "one owner's requests keep their order"
                inside.remove(taken)
            case 4 if inside:
                gone = {inside[int(rng.integers(len(inside)))] for _ in range(3)}
                for handle in gone:
                    handle.cancelled = True
                assert set(queue.drop_cancelled()) == gone
                inside = [handle for handle in inside if handle not in gone]
                cancelled += len(gone)
        assert len(queue) == len(inside) == len(list(queue))
        assert queue.tokens == sum(len(handle.request.tokens) for handle in inside)
    assert cancelled > 100
    queue.clear()
    assert not queue and queue.tokens == 0


def test_a_full_queue_counts_the_requests_of_all_owners():
    queue = RequestQueue(2, 50)
    for owner in ("a", "a", "b"):
        queue.put(waiting(owner, 20))
    # The next to be taken is of a, then of b: with one free entry, a and b have 20 tokens each.
    assert not queue.is_full(10, 2) and queue.is_full(1, 1)
    assert queue.is_full(31, 2)


def test_a_blocked_owner_is_passed_over_and_keeps_its_turn():
    queue = RequestQueue(100, 1000)
    for owner in ("a", "b", "b"):
        queue.put(waiting(owner))
    assert queue.take(["a"]).request.owner == "b"
    assert queue.take(["a", "b"]) is None and len(queue) == queue.tokens == 2
    assert [queue.take().request.owner for _ in range(2)] == ["a", "b"] and queue.take() is None


def test_one_owner_cannot_take_every_batch_entry():
    engine = Engine(plain(), max_batch=3, chunk=16, max_per_owner=2)
    greedy = [Recorder() for _ in range(4)]
    for seed, listener in enumerate(greedy):
        engine.submit(Request((1, 2, 3), 200, owner="greedy", seed=seed), listener)
    for _ in range(20):
        engine.step()
    assert engine.running == 2 and engine.waiting == 2
    late = Recorder()
    engine.submit(Request((3, 2, 1), 5, owner="other"), late)
    for _ in range(20):
        engine.step()
    assert late.outcome.reason == "length" and not any(listener.outcomes for listener in greedy)
    finish(engine)
    assert [len(listener.tokens) for listener in greedy] == [200] * 4


@pytest.mark.parametrize("config", [None, PrefixConfig(num_blocks=4)], ids=["plain", "prefixes"])
@pytest.mark.parametrize("policy", ["streaming:sinks=2,window=14", "full"])
def test_a_long_prompt_delays_no_other_owner(policy, config):
    """Two owners' prompts take turns, and no answer changes."""
    engine = Engine(plain(policy), max_batch=3, max_len=1024, chunk=16, prefix_cache=config,
                    max_per_owner=3)  # fmt: skip
    long = [Request(tuple(range(1, 41)) * 20, 4, owner=name, salt=name) for name in "ab"]
    short = [Request(tuple(range(n, n + 20)), 4, owner=name, salt=name)
             for n, name in enumerate("bbc")]  # fmt: skip
    asked = [long[0], *short[:2], long[1], short[2]]
    alone = [ask(engine, request)[0].tokens for request in asked]
    for cancelled in (None, 0, 3):
        assert engine.reset_prefix_cache()
        listeners = [Recorder() for _ in asked]
        handles = [engine.submit(*submission) for submission in zip(asked, listeners, strict=True)]
        for _ in range(12):
            engine.step()
        assert [len(listener.outcomes) for listener in listeners[:2]] == [0, 1], (
            "b is done and a is not"
        )
        if cancelled is not None:
            engine.cancel(handles[cancelled])
        finish(engine)
        for number, (listener, tokens) in enumerate(zip(listeners, alone, strict=True)):
            reason = "cancelled" if number == cancelled else "length"
            assert listener.outcome.reason == reason
            assert listener.tokens == (tokens if reason == "length" else [])
        assert engine.running == engine.waiting == 0
        assert config is None or engine.metrics()["prefix_entries_in_use"] == 0


def test_two_prefills_have_their_own_entries():
    engine = Engine(plain(), max_batch=3, chunk=16, max_per_owner=3)
    asked = [Request(tuple(range(1, 41)) * size, 20, owner=name)
             for name, size in zip("abc", (4, 3, 2), strict=True)]  # fmt: skip
    alone = [ask(engine, request)[0].tokens for request in asked]
    listeners = [Recorder() for _ in asked]
    for submission in zip(asked, listeners, strict=True):
        engine.submit(*submission)
    max_prefills = 0
    while engine.step():
        max_prefills = max(max_prefills, len(engine._prefills))
    assert max_prefills == 2 and [listener.tokens for listener in listeners] == alone


def test_a_failing_prefill_releases_its_prefix(monkeypatch):
    config = PrefixConfig(num_blocks=8)
    engine = Engine(plain("full"), max_batch=2, max_len=256, chunk=16, prefix_cache=config)
    engine.submit(Request(tuple(range(40)), 4), Recorder())
    engine.step()

    def fail(*_):
        assert engine.running == 1
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine._programs, "prefill", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    assert engine.metrics()["prefix_entries_in_use"] == 0 and engine.reset_prefix_cache()
