"""Continuous batching: answers do not depend on other requests, and every request ends."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.sampling import Sampling, draw_each
from jaxkv.serve.engine import Engine, Overloaded, PrefixConfig, Request, answer, programs
from tests.serve.engine.plain import VOCAB, Recorder, ask, finish, new_plain, plain, prompts
from tests.serve.http.conftest import eventually

WARM = Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
KINDS = (
    Sampling(),
    WARM,
    Sampling(temperature=1.3),
    Sampling(temperature=0.7, top_k=3),
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(repetition_penalty=1.5),
)


def test_a_finished_request_does_not_affect_the_sampling_of_others(monkeypatch):
    """Its batch entry keeps its sampling settings, but a greedy batch must skip noise and sort."""
    temperatures = []

    def watched(knobs, *args):
        jax.debug.callback(lambda t: temperatures.append(np.asarray(t).tolist()), knobs.temperature)
        return draw_each(knobs, *args)

    monkeypatch.setattr(programs, "draw_each", watched)
    engine = Engine(new_plain(), max_batch=2, chunk=16)
    ask(engine, Request((1, 2, 3), 4, WARM), Request((1, 2, 3), 4, WARM))
    jax.effects_barrier()
    assert any(max(step) > 0 for step in temperatures)
    temperatures.clear()
    ask(engine, Request((1, 2, 3), 4))
    jax.effects_barrier()
    assert temperatures and all(max(step) == 0 for step in temperatures)


def requests(count: int, seed: int = 0, **fields) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(tokens, int(rng.integers(1, 40)), KINDS[n % len(KINDS)], seed=n, **fields)
        for n, tokens in enumerate(prompts(count, seed))
    ]


def outcome_of(listener: Recorder):
    return (
        listener.tokens,
        listener.echoed,
        [scored.logprob for scored in listener.scored],
        listener.outcome.reason,
    )


def test_answers_together_equal_answers_alone(engine):
    asked = [
        *requests(20),
        *requests(6, 1, logprobs=5),
        *requests(6, 2, logprobs=2, echo=True),
        *requests(6, 3, presence_penalty=0.5, frequency_penalty=1.0, bias=((3, 2.0), (5, -9.0))),
    ]
    alone = [outcome_of(*ask(engine, request)) for request in asked]
    assert [outcome_of(listener) for listener in ask(engine, *asked)] == alone
    backwards = [outcome_of(listener) for listener in ask(engine, *reversed(asked))]
    assert backwards[::-1] == alone
    assert all(
        len(tokens) == r.max_new_tokens for (tokens, *_), r in zip(alone, asked, strict=True)
    )


def test_nothing_is_compiled_while_it_serves(engine):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "/jax/core/compile" in event else None
    )
    ask(engine, *requests(12, 5), *requests(3, 6, echo=True, logprobs=1))
    assert not compiled
    of_chunk = ("begin", "the layers", "end", "end with scores")
    assert engine.compilations == len(("feed", "sample", "insert", "bias", "empty", "init")) + len(
        of_chunk
    )


@pytest.mark.parametrize("policy", ["full", "streaming:sinks=2,window=14"])
def test_nothing_is_compiled_while_prefixes_move_between_tiers(policy):
    config = PrefixConfig(num_blocks=3, where="every=1", num_host_blocks=20)
    engine = Engine(plain(policy), max_batch=2, max_len=256, chunk=16, prefix_cache=config)
    before = engine.compilations
    for _ in range(2):
        ask(engine, *(Request((n, *range(40)), 2) for n in range(6)))
    metrics = engine.metrics()
    assert engine.compilations == before and metrics["prefix_entries_in_use"] == 0
    assert metrics["promotions"] > 3 and metrics["demotions"] > 3


def test_a_cancelled_prefill_counts_its_computed_tokens():
    engine = Engine(plain(), max_batch=1, chunk=16, max_prefill_tokens=16)
    listener = Recorder()
    handle = engine.submit(Request((1,) * 160, 4), listener)
    for _ in range(3):
        engine.step()
    engine.cancel(handle)
    finish(engine)
    assert (listener.outcome.reason, listener.outcome.computed_tokens) == ("cancelled", 48)


def test_eos_stop_and_length_end_an_answer(engine):
    (free,) = ask(engine, Request((1, 2, 3), 30))
    word = free.tokens[4]
    first = free.tokens.index(word)
    (ended,) = ask(engine, Request((1, 2, 3), 30, eos=(word,)))
    assert (ended.tokens, ended.outcome.reason) == (free.tokens[: first + 1], "eos")
    listener = Recorder(stop=word)
    engine.submit(Request((1, 2, 3), 30), listener)
    finish(engine)
    assert (listener.tokens, listener.outcome.reason) == (free.tokens[: first + 1], "stop")
    assert (free.outcome.reason, free.outcome.new_tokens) == ("length", 30)
    (scored,) = ask(engine, Request((1, 2, 3), 0, echo=True))
    assert (scored.tokens, scored.outcome.reason, len(scored.echoed)) == ([], "length", 3)


def test_log_probabilities_equal_those_of_the_model(engine):
    tokens = prompts(1, 9, max_tokens=60)[0] + (4, 4, 4)
    (listener,) = ask(engine, Request(tokens, 8, logprobs=3, echo=True))
    text = [*tokens, *listener.tokens]
    (again,) = ask(engine, Request(tuple(text), 0, logprobs=3, echo=True))
    assert again.echoed[0].logprob is None
    scores = [*listener.echoed[1:], *listener.scored]
    np.testing.assert_allclose(
        [s.logprob for s in scores], [s.logprob for s in again.echoed[1:]], atol=1e-5
    )
    for scored in scores:
        best = [value for _, value in scored.top]
        assert best == sorted(best, reverse=True) and len(best) == 3
        assert scored.logprob <= best[0]
    assert [s.top[0][0] for s in listener.scored] == listener.tokens  # greedy


def test_penalties_and_biases(engine):
    (plainly,) = ask(engine, Request((7,), 30))
    (biased,) = ask(engine, Request((7,), 5, bias=((11, 1e4),)))
    assert biased.tokens == [11] * 5
    (once,) = ask(engine, Request((7,), 30, presence_penalty=1e4))
    assert len(set(once.tokens)) == 30 > len(set(plainly.tokens))
    (rarely,) = ask(engine, Request((7,), 2 * VOCAB, frequency_penalty=1e4))
    assert np.bincount(rarely.tokens, minlength=VOCAB).tolist() == [2] * VOCAB


def test_cancelling_at_any_step():
    engine = Engine(plain(), max_batch=2, chunk=16, max_prefill_tokens=16)
    asked = [Request(tuple(range(40)), 20, seed=n) for n in range(6)]
    uncancelled = [listener.tokens for listener in ask(engine, *asked)]
    for steps in range(30):
        listeners = [Recorder() for _ in asked]
        handles = [engine.submit(*submission) for submission in zip(asked, listeners, strict=True)]
        for _ in range(steps):
            engine.step()
        for handle in handles[::2]:
            engine.cancel(handle)
            engine.cancel(handle)
        finish(engine)
        for listener, tokens in zip(listeners[1::2], uncancelled[1::2], strict=True):
            assert (listener.tokens, listener.outcome.reason) == (tokens, "length")
        for listener, tokens in zip(listeners[::2], uncancelled[::2], strict=True):
            assert listener.tokens == tokens[: len(listener.tokens)]
            assert listener.outcome.reason == (
                "length" if listener.tokens == tokens else "cancelled"
            )
        assert engine.running == engine.waiting == 0


@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_decode_step_copies_no_cache(max_batch):
    """Otherwise one sequence takes longer than several. Half of the keys and values are copied
    where at most half of the slots are filled (`attend_filled`)."""
    engine = Engine(plain("full"), max_batch=max_batch, max_len=4096, chunk=16)
    cache = max(leaf.nbytes for leaf in jax.tree.leaves(engine._running._batch.states))
    feed = engine._programs.by_size[max_batch].feed
    assert feed.memory_analysis().temp_size_in_bytes < 1.5 * cache


def test_prompts_delay_running_answers_by_at_most_the_prefill_budget():
    """Each step delivers a token of the running answer, while six long prompts arrive."""
    for budget, max_step in ((None, 16), (32, 32), (40, 32)):  # 40: no third chunk of 16
        engine = Engine(plain(), max_batch=8, chunk=16, max_prefill_tokens=budget)
        listener = Recorder()
        engine.submit(Request((1, 2, 3), 400), listener)
        for _ in range(3):
            engine.step()
        for seed in range(6):
            engine.submit(Request((5,) * 390, 1, seed=seed), Recorder())
        steps = 0
        while engine.waiting or engine.running > 1:
            before, tokens = engine.metrics()["step_tokens"], len(listener.tokens)
            running = engine.running
            engine.step()
            assert engine.metrics()["step_tokens"] - before <= max_step + running
            assert len(listener.tokens) == tokens + 1
            steps += 1
        assert steps >= 6 * 390 // max_step
        finish(engine)


def test_the_engine_runs_in_its_own_thread():
    engine = Engine(plain(), max_batch=3, max_len=2**31 - 1, chunk=16)
    asked = requests(10, 4)
    alone = [listener.tokens for listener in ask(engine, *asked)]
    engine.start()
    try:
        listeners = [Recorder() for _ in asked]
        for request, listener in zip(asked, listeners, strict=True):
            engine.submit(request, listener)
        eventually(lambda: all(listener.outcomes for listener in listeners))
        assert [listener.tokens for listener in listeners] == alone
        last = Recorder()
        engine.submit(Request((1,), 10**6), last)
    finally:
        engine.stop()
    assert last.outcome.reason == "cancelled"
    with pytest.raises(Overloaded):
        engine.submit(Request((1,), 1), Recorder())
    with pytest.raises(RuntimeError, match="starts once"):
        engine.start()


def test_answer_takes_more_requests_than_the_queue():
    engine = Engine(plain(), max_batch=2, chunk=16, queue=3)
    asked = requests(12, 8)
    alone = [ask(engine, request)[0].tokens for request in asked]
    assert [answered.tokens for answered in answer(engine, asked)] == alone
    with pytest.raises(UserError):
        answer(engine, [*asked[:2], Request((VOCAB,), 1)])
    finish(engine)
    assert engine.running == engine.waiting == 0
    assert answer(engine, []) == []
