"""An engine or a listener that fails or hangs: every client gets an answer."""

from __future__ import annotations

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jaxkv.serve.engine import Engine, Overloaded, PrefixConfig, Request
from tests.serve.engine.plain import Recorder, ask, finish, plain
from tests.serve.http.conftest import eventually


@pytest.mark.parametrize("second", ["release", "free"])
def test_a_second_failure_while_giving_up(monkeypatch, caplog, second):
    """The device fails, and then the prefix store or the batch too: all six clients get an end."""
    engine = Engine(plain(), max_batch=2, chunk=16, prefix_cache=PrefixConfig(num_blocks=4))
    listeners = [Recorder() for _ in range(6)]
    for number, listener in enumerate(listeners):
        engine.submit(Request((number,) * 700, 9), listener)

    def fail(*arguments):
        raise RuntimeError("the device is gone")

    class Broken(list):
        def __setitem__(self, index, value):
            fail()

    while not engine._running.running:
        engine.step()
    assert engine.step() and engine._prefills  # one decodes, one is in prefill
    monkeypatch.setattr(engine._programs, "prefill", fail)
    monkeypatch.setattr(engine._programs, "feed", fail)
    if second == "release":
        monkeypatch.setattr(engine._store, "release", fail)
    else:
        engine._running.handles = Broken(engine._running.handles)
    with pytest.raises(RuntimeError, match="the device is gone"):
        finish(engine)
    assert {listener.outcome.reason for listener in listeners} == {"error"}
    assert not engine.healthy and "freeing the memory of a request failed" in caplog.text


def test_a_failing_thread_logs_the_failure_and_ends(monkeypatch, caplog):
    engine = Engine(plain(), max_batch=2, chunk=16)
    monkeypatch.setattr(engine._programs, "feed", lambda *_: 1 / 0)
    engine.start()
    listener = Recorder()
    engine.submit(Request((1, 2), 9), listener)
    eventually(lambda: listener.outcomes)
    assert listener.outcome.reason == "error" and "ZeroDivisionError" in engine.failure
    assert engine.stop(10)
    assert "the engine failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_too_little_memory_of_the_device_is_one_line(monkeypatch, caplog):
    def exhausted() -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    engine = Engine(plain(), max_batch=2, chunk=16)
    monkeypatch.setattr(engine, "_step", exhausted)
    engine.start()
    listener = Recorder()
    engine.submit(Request((1, 2), 9), listener)
    critical = lambda: [record for record in caplog.records if record.levelname == "CRITICAL"]
    eventually(lambda: listener.outcomes and critical())
    (record,) = critical()
    assert record.exc_info is None and "weights take 15.0 KiB, sequences take" in record.message
    assert "9 bytes more; give a smaller --max-batch, or a smaller policy" in record.message
    assert listener.outcome.reason == "error"


def test_a_device_call_that_does_not_return(monkeypatch):
    """The engine is unhealthy after the limit, refuses requests, stops, and recovers if it can."""
    engine = Engine(plain(), max_batch=2, chunk=16, step_seconds=0.2)
    feed, released = engine._programs.feed, threading.Event()

    def hang(*arguments):
        released.wait(60)
        return feed(*arguments)

    monkeypatch.setattr(engine._programs, "feed", hang)
    engine.start()
    first, second = Recorder(), Recorder()
    engine.submit(Request((1, 2), 3), first)
    assert engine.healthy
    eventually(lambda: not engine.healthy)
    with pytest.raises(Overloaded, match=r"a step has taken more than 0\.2 s"):
        engine.submit(Request((1,), 1), Recorder())
    released.set()
    eventually(lambda: first.outcomes)
    assert first.outcome.reason == "length"
    eventually(lambda: engine.healthy)
    released.clear()
    engine.submit(Request((1, 2), 3), second)
    eventually(lambda: not engine.healthy)
    start = time.monotonic()
    assert not engine.stop(0.1)
    assert time.monotonic() - start < 5 and second.outcome.reason == "cancelled"
    released.set()
    assert engine.stop(30)
    assert second.outcomes[1:] == []


def test_a_listener_that_raises_ends_only_its_own_answer(engine):
    fine = Request((1, 2), 12)
    (expected,) = ask(engine, fine)
    listeners = [Recorder(fail="token"), Recorder(), Recorder(fail="done")]
    for listener in listeners:
        engine.submit(fine, listener)
    finish(engine)
    assert (
        listeners[0].outcome.reason == "error"
        and "this listener is broken" in listeners[0].outcome.error
    )
    assert listeners[1].tokens == listeners[2].tokens == expected.tokens
    assert engine.healthy and engine.running == 0


def test_a_listener_cannot_stop_the_engine_that_calls_it():
    engine = Engine(plain(), max_batch=1, chunk=16)

    class Stops(Recorder):
        def token(self, scored):
            engine.stop()
            return super().token(scored)

    engine.start()
    listener = Stops()
    engine.submit(Request((1,), 3), listener)
    eventually(lambda: listener.outcomes)
    assert (listener.outcome.reason, engine.healthy) == ("error", True)
    engine.stop()
    with pytest.raises(RuntimeError, match="starts once"):
        engine.start()


def test_logits_that_are_not_finite_end_only_one_answer():
    model = plain()

    def embed(w, tokens):
        return jnp.where(tokens[..., None] == 5, jnp.nan, model.embed(w, tokens))

    engine = Engine(dataclasses.replace(model, embed=embed), max_batch=2, chunk=16)
    never, always = ((5, -1e4),), ((5, 1e4),)
    fine, lost, fed = ask(
        engine,
        Request((1, 2), 9, bias=never),
        Request((1, 5), 9),
        Request((1, 2), 9, bias=always),
    )
    assert lost.outcome.reason == fed.outcome.reason == "error"
    assert "finite" in lost.outcome.error and (len(lost.tokens), len(fed.tokens)) == (0, 1)
    assert fine.outcome.reason == "length" and engine.healthy


@pytest.mark.parametrize(
    "broken", ["init_prefill", "prefill", "insert", "feed", "sample", "deliver"]
)
def test_a_failure_ends_every_answer_once(monkeypatch, broken):
    engine = Engine(plain(), max_batch=2, chunk=16)

    def fail(*arguments):
        raise RuntimeError("the device is gone")

    programs = engine._programs
    if broken == "deliver":
        monkeypatch.setattr(engine._delivery, "deliver", fail)
    else:
        monkeypatch.setattr(programs, broken, fail)
    listeners = [Recorder() for _ in range(5)]
    for number, listener in enumerate(listeners):
        engine.submit(Request((1, 2, 3), number, echo=True), listener)
    with pytest.raises(RuntimeError, match="the device is gone"):
        finish(engine)
    assert {listener.outcome.reason for listener in listeners} <= {"error", "length"}
    assert not engine.healthy and engine.running == engine.waiting == 0
    with pytest.raises(Overloaded, match="the device is gone"):
        engine.submit(Request((1,), 1), Recorder())
