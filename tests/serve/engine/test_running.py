"""A decode batch that grows with load: moves between sizes change no answer and lose nothing."""

from __future__ import annotations

import gc
import itertools
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.sampling import Sampling
from jaxkv.serve.engine import Engine, PrefixConfig, Request, running
from jaxkv.serve.engine.plan import sizes
from jaxkv.serve.engine.programs import batch_sizes, submit_moves
from tests.seldom import seldom
from tests.serve.engine.plain import Recorder, ask, finish, plain, prompts

POLICIES = ["streaming:sinks=2,window=14", "full", seldom("reservoir:sinks=2,window=6,sample=8"),
            seldom("snapkv:capacity=12,window=4"), "keydiff:capacity=12,every=5"]  # fmt: skip


def test_sizes():
    assert [batch_sizes(n) for n in (1, 2, 4, 15, 16, 17, 64)] == [
        (1,), (1, 2), (1, 4), (1, 4, 15), (1, 4, 16), (1, 4, 17), (1, 4, 16, 64)
    ]  # fmt: skip


def close(listener: Recorder, expected: Recorder) -> None:
    """Equal tokens, and log probabilities that differ by rounding alone."""
    assert listener.tokens == expected.tokens
    assert listener.outcome.reason == expected.outcome.reason
    np.testing.assert_allclose(
        [scored.logprob for scored in listener.scored],
        [scored.logprob for scored in expected.scored], atol=2e-5,
    )  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_those_of_a_fixed_batch(policy, monkeypatch):
    """Requests arrive one by one and in crowds, end at all times, and outlive their neighbours.

    Some score their prompt, some generate nothing, and prompts share prefixes.
    """
    monkeypatch.setattr(running, "SHRINK_AFTER", 3)
    asked = [
        Request(tokens, 0 if number == 6 else 4 + 13 * (number % 5),
                Sampling(temperature=0.8 * (number % 2)), seed=number, logprobs=0, eos=(7,),
                min_new_tokens=4 * (number % 3 == 2), echo=number in (6, 9))
        for number, tokens in enumerate([*prompts(13, 3), prompts(13, 3)[0]])
    ]  # fmt: skip
    fixed = Engine(plain(policy), max_batch=16, max_len=160, chunk=16)
    engine = Engine(plain(policy), max_batch=16, max_len=160, chunk=16, fixed_batch=False,
                    prefix_cache=PrefixConfig(memory=2**20))  # fmt: skip
    compiled, seen, listeners = engine.compilations, [], []
    waits = [0, 9, 0, 0, 3, 0, 0, 0, 25, 2, 2, 40, 0, 0]
    for request, steps in zip(asked, waits, strict=True):
        for _ in range(steps):
            engine.step()
            seen.append(engine.metrics()["batch_size"])
        engine.submit(request, listener := Recorder())
        listeners.append(listener)
    while engine.step():
        seen.append(engine.metrics()["batch_size"])
    assert set(seen) == {1, 4, 16} and seen[-1] < 16
    changes = [(a, b) for a, b in itertools.pairwise(seen) if a != b]
    assert any(a < b for a, b in changes) and any(a > b for a, b in changes)
    assert engine.compilations == compiled
    for listener, expected in zip(listeners, ask(fixed, *asked), strict=True):
        close(listener, expected)


def test_a_batch_has_the_size_that_its_requests_need(monkeypatch):
    """And its memory is that of all sizes, from the start on."""
    monkeypatch.setattr(running, "SHRINK_AFTER", 5)
    plain()
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    engine = Engine(plain(), max_batch=16, chunk=16, fixed_batch=False)
    held = sum(array.nbytes for array in jax.live_arrays()) - before
    sequence = sizes(plain(), None, 16).sequence
    assert held == (1 + 4 + 16) * sequence < engine.bytes["sequences"]

    def steps(count: int) -> int:
        for _ in range(count):
            engine.step()
        return engine.metrics()["batch_size"]

    long = Recorder()
    engine.submit(Request((1, 2), 100), long)
    assert steps(3) == 1
    crowd = [Recorder() for _ in range(6)]
    for number, listener in enumerate(crowd):
        engine.submit(Request((1, 2), 9, seed=number), listener)
    assert steps(8) == 16
    while any(not listener.outcomes for listener in crowd):
        steps(1)
    # Within five steps, four requests ran together; then the long one alone, which has moved.
    assert steps(1) == 16 and steps(4) == 4 and steps(5) == 1
    finish(engine)
    assert long.tokens == ask(engine, Request((1, 2), 100))[0].tokens and len(long.tokens) == 100
    batches = jax.tree.leaves(engine._running._batches)
    assert sum(leaf.nbytes for leaf in batches) == held


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (4, 8), (8, 4)])
def test_a_move_copies_entries_in_place(sizes):
    """It needs memory for one entry at most."""
    old, new = (
        {"a": jnp.arange(size * 4096, dtype=jnp.float32).reshape(size, 2, 4, 512) + size,
         "b": jnp.arange(size)} for size in sizes
    )  # fmt: skip
    compiled = []

    def begin(function, *shapes, donate, out):
        program = jax.jit(function, donate_argnums=donate).lower(*shapes).compile()
        compiled.append(program)
        done = Future()
        done.set_result(program)
        return done

    shapes = jax.eval_shape(lambda: (old, new))
    futures = submit_moves(begin, shapes[0], sizes[0], shapes[1], sizes[1])
    expected = {name: np.array(leaf) for name, leaf in new.items()}
    order, count = np.arange(min(sizes))[::-1].astype("i4"), min(sizes) - (min(sizes) > 1)
    for name, leaf in old.items():
        expected[name][:count] = np.asarray(leaf)[order[:count]]
    for future, name in zip(futures, old, strict=True):
        actual = future.result()(old[name], new[name], order, np.int32(count))
        np.testing.assert_array_equal(actual, expected[name])
    assert all(
        program.memory_analysis().temp_size_in_bytes <= 4 * 4096 + 999 for program in compiled
    )


def test_a_cancelled_request_leaves_no_trace(monkeypatch):
    """Also while it is in prefill, and when its neighbours have moved."""
    monkeypatch.setattr(running, "SHRINK_AFTER", 2)
    engine = Engine(plain(), max_batch=5, chunk=16, fixed_batch=False, max_per_owner=4)
    first, *cancelled = [Recorder() for _ in range(5)]
    handles = [
        engine.submit(Request((number, *range(40)), 60, owner=str(number)), listener)
        for number, listener in enumerate(cancelled)
    ]
    engine.submit(Request((1, 2, 3), 60, owner="first"), first)
    while len(engine._running.running) < 5:  # `first` is the last of them
        engine.step()
    for count, handle in enumerate(handles):
        engine.cancel(handle)
        for _ in range(count + 2):
            engine.step()
    assert engine.metrics()["batch_size"] == 1 and not first.outcomes  # it has moved
    finish(engine)
    assert {listener.outcome.reason for listener in cancelled} == {"cancelled"}
    assert first.tokens == ask(engine, Request((1, 2, 3), 60))[0].tokens
    assert engine.running == 0 and not any(engine._running.handles)
