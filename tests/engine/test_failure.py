"""An engine that fails or hangs: every client gets an answer, and the engine says so."""

from __future__ import annotations

import threading
import time

import pytest

from jaxkv.engine import Engine, Overloaded, PrefixConfig, Request
from tests.engine.plain import Recorder, finish, plain


def wait_for(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("second", ["release", "free"])
def test_a_second_failure_while_giving_up(monkeypatch, caplog, second):
    """The device fails, and then the prefix store or the batch too: all six clients get an end."""
    engine = Engine(plain(), max_batch=2, chunk=16, prefix_cache=PrefixConfig(num_blocks=4))
    listeners = [Recorder() for _ in range(6)]
    for number, listener in enumerate(listeners):
        engine.submit(Request((number,) * 700, 9), listener)

    def fail(*given):
        raise RuntimeError("the device is gone")

    class Broken(list):
        def __setitem__(self, index, value):
            fail()

    while not any(engine._running):
        engine.step()
    assert engine.step() and engine._prefill  # one decodes, one is in prefill
    monkeypatch.setattr(engine._programs, "prefill", fail)
    monkeypatch.setattr(engine._programs, "decode", fail)
    if second == "release":
        monkeypatch.setattr(engine._store, "release", fail)
    else:
        engine._running = Broken(engine._running)
    with pytest.raises(RuntimeError, match="the device is gone"):
        finish(engine)
    assert {listener.outcome.reason for listener in listeners} == {"error"}
    assert not engine.healthy and "freeing the memory of a request failed" in caplog.text


def test_a_failing_thread_logs_the_failure_and_ends(monkeypatch, caplog):
    engine = Engine(plain(), max_batch=2, chunk=16)
    monkeypatch.setattr(engine._programs, "decode", lambda *_: 1 / 0)
    engine.start()
    listener = Recorder()
    engine.submit(Request((1, 2), 9), listener)
    wait_for(lambda: listener.outcomes)
    assert listener.outcome.reason == "error" and "ZeroDivisionError" in engine.failure
    assert engine.stop(10)
    assert "the engine failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_device_call_that_does_not_return(monkeypatch):
    """The engine is unhealthy after the limit, refuses requests, stops, and recovers if it can."""
    engine = Engine(plain(), max_batch=2, chunk=16, step_seconds=0.2)
    decode, released = engine._programs.decode, threading.Event()

    def hang(*given):
        released.wait(60)
        return decode(*given)

    monkeypatch.setattr(engine._programs, "decode", hang)
    engine.start()
    first, second = Recorder(), Recorder()
    engine.submit(Request((1, 2), 3), first)
    assert engine.healthy
    wait_for(lambda: not engine.healthy)
    with pytest.raises(Overloaded, match=r"a step has taken more than 0\.2 s"):
        engine.submit(Request((1,), 1), Recorder())
    released.set()
    wait_for(lambda: first.outcomes)
    assert first.outcome.reason == "length"
    wait_for(lambda: engine.healthy)
    released.clear()
    engine.submit(Request((1, 2), 3), second)
    wait_for(lambda: not engine.healthy)
    begun = time.monotonic()
    assert not engine.stop(0.1)
    assert time.monotonic() - begun < 5 and second.outcome.reason == "cancelled"
    released.set()
    assert engine.stop(30)
    assert second.outcomes[1:] == []
