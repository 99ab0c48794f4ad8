"""Many answers at once are the answers one by one, and nobody waits for ever."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import Engine, Overloaded, Prefixes, Request, answer
from jaxkv.errors import UserError
from jaxkv.sampling import Sampling
from tests.engine.plain import VOCAB, Ear, ask, finish, plain, prompts

WARM = Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
KINDS = (
    Sampling(),
    WARM,
    Sampling(temperature=1.3),
    Sampling(temperature=0.7, top_k=3),
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(repetition_penalty=1.5),
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(plain(), slots=4, chunk=16, turn=32)


def requests(count: int, seed: int = 0, **fields) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(tokens, int(rng.integers(1, 40)), KINDS[n % len(KINDS)], seed=n, **fields)
        for n, tokens in enumerate(prompts(count, seed))
    ]


def told(ear: Ear):
    return ear.tokens, ear.echoed, [scored.logprob for scored in ear.scored], ear.outcome.reason


def test_together_as_alone(engine):
    asked = [
        *requests(20),
        *requests(6, 1, logprobs=5),
        *requests(6, 2, logprobs=2, echo=True),
        *requests(6, 3, presence_penalty=0.5, frequency_penalty=1.0, bias=((3, 2.0), (5, -9.0))),
    ]
    alone = [told(*ask(engine, request)) for request in asked]
    assert [told(ear) for ear in ask(engine, *asked)] == alone
    backwards = [told(ear) for ear in ask(engine, *reversed(asked))]
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
    assert engine.compilations == 3 + 2 * len((16,)) + 1


@pytest.mark.parametrize("policy", ["full", "streaming:sinks=2,window=14"])
def test_nothing_is_compiled_while_prefixes_come_and_go(policy):
    how = Prefixes(3, where="every=1", host_slots=20)
    engine = Engine(plain(policy), slots=2, room=256, chunk=16, prefixes=how)
    before = engine.compilations
    for _ in range(2):
        ask(engine, *(Request((n, *range(40)), 2) for n in range(6)))
    figures = engine.figures()
    assert engine.compilations == before and figures["snapshot_slots_held"] == 0
    assert figures["promotions"] > 3 and figures["demotions"] > 3


def test_prefixes_are_not_touched_beside_the_thread():
    engine = Engine(plain(), slots=1, chunk=16, prefixes=Prefixes(4))
    engine.start()
    for touch in (engine.forget, lambda: engine.pin((1, 2)), lambda: engine.unpin(None)):
        with pytest.raises(RuntimeError, match="before start"):
            touch()
    engine.stop()
    assert engine.forget()


def test_of_a_prompt_that_was_given_up_what_was_read_is_counted():
    engine = Engine(plain(), slots=1, chunk=16, turn=16)
    ear = Ear()
    ticket = engine.submit(Request((1,) * 160, 4), ear)
    for _ in range(3):
        engine.step()
    engine.cancel(ticket)
    finish(engine)
    assert (ear.outcome.reason, ear.outcome.read_tokens) == ("cancelled", 48)


def test_what_ends_an_answer(engine):
    (free,) = ask(engine, Request((1, 2, 3), 30))
    word = free.tokens[4]
    first = free.tokens.index(word)
    (ended,) = ask(engine, Request((1, 2, 3), 30, eos=(word,)))
    assert (ended.tokens, ended.outcome.reason) == (free.tokens[: first + 1], "eos")
    ear = Ear(stop=word)
    engine.submit(Request((1, 2, 3), 30), ear)
    finish(engine)
    assert (ear.tokens, ear.outcome.reason) == (free.tokens[: first + 1], "stop")
    assert (free.outcome.reason, free.outcome.new_tokens) == ("length", 30)
    (scored,) = ask(engine, Request((1, 2, 3), 0, echo=True))
    assert (scored.tokens, scored.outcome.reason, len(scored.echoed)) == ([], "length", 3)


def test_log_probabilities_are_those_of_the_model(engine):
    tokens = prompts(1, 9, most=60)[0] + (4, 4, 4)
    (ear,) = ask(engine, Request(tokens, 8, logprobs=3, echo=True))
    text = [*tokens, *ear.tokens]
    (again,) = ask(engine, Request(tuple(text), 0, logprobs=3, echo=True))
    assert again.echoed[0].logprob is None
    given = [*ear.echoed[1:], *ear.scored]
    np.testing.assert_allclose(
        [s.logprob for s in given], [s.logprob for s in again.echoed[1:]], atol=1e-5
    )
    for scored in given:
        best = [value for _, value in scored.top]
        assert best == sorted(best, reverse=True) and len(best) == 3
        assert scored.logprob <= best[0]
    assert [s.top[0][0] for s in ear.scored] == ear.tokens  # greedy


def test_penalties_and_biases(engine):
    (plainly,) = ask(engine, Request((7,), 30))
    (biased,) = ask(engine, Request((7,), 5, bias=((11, 1e4),)))
    assert biased.tokens == [11] * 5
    (once,) = ask(engine, Request((7,), 30, presence_penalty=1e4))
    assert len(set(once.tokens)) == 30 > len(set(plainly.tokens))
    (rarely,) = ask(engine, Request((7,), 2 * VOCAB, frequency_penalty=1e4))
    assert np.bincount(rarely.tokens, minlength=VOCAB).tolist() == [2] * VOCAB


def test_cancelled_at_any_moment():
    engine = Engine(plain(), slots=2, chunk=16, turn=16)
    asked = [Request(tuple(range(40)), 20, seed=n) for n in range(6)]
    whole = [ear.tokens for ear in ask(engine, *asked)]
    for turns in range(30):
        ears = [Ear() for _ in asked]
        tickets = [engine.submit(*each) for each in zip(asked, ears, strict=True)]
        for _ in range(turns):
            engine.step()
        for ticket in tickets[::2]:
            engine.cancel(ticket)
            engine.cancel(ticket)
        finish(engine)
        for ear, tokens in zip(ears[1::2], whole[1::2], strict=True):
            assert (ear.tokens, ear.outcome.reason) == (tokens, "length")
        for ear, tokens in zip(ears[::2], whole[::2], strict=True):
            assert ear.tokens == tokens[: len(ear.tokens)]
            assert ear.outcome.reason == ("length" if ear.tokens == tokens else "cancelled")
        assert engine.running == engine.waiting == 0


def test_an_ear_that_breaks_loses_its_answer_alone(engine):
    fine = Request((1, 2), 12)
    (wanted,) = ask(engine, fine)
    ears = [Ear(fail="token"), Ear(), Ear(fail="done")]
    for ear in ears:
        engine.submit(fine, ear)
    finish(engine)
    assert ears[0].outcome.reason == "error" and "this ear is broken" in ears[0].outcome.error
    assert ears[1].tokens == ears[2].tokens == wanted.tokens
    assert engine.healthy and engine.running == 0


def test_a_full_queue_says_when_to_come_again():
    engine = Engine(plain(), slots=1, chunk=16, queue=2, queue_tokens=50)
    engine.submit(Request((1,) * 40, 4), Ear())
    engine.submit(Request((1,) * 40, 4), Ear())  # the one before will take the slot
    with pytest.raises(Overloaded) as many:
        engine.submit(Request((1,) * 20, 4), Ear())
    assert 1 <= many.value.seconds <= 60
    engine.submit(Request((1,), 4), Ear())
    with pytest.raises(Overloaded):
        engine.submit(Request((1,), 4), Ear())
    finish(engine)
    (large,) = ask(engine, Request((1,) * 60, 4))  # alone it may be larger than the queue
    assert large.outcome.reason == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": ()},
        {"tokens": (VOCAB,)},
        {"tokens": (-1,)},
        {"max_new_tokens": -1},
        {"seed": -1},
        {"seed": 2**32},
        {"salt": ""},
        {"salt": "\ud800"},
        {"salt": 5},
        {"tokens": (1.5,)},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": float("nan")},
        {"max_new_tokens": 5000},
        {"seed": 0.5},
        {"tokens": (True,)},
        {"eos": (True,)},
        {"logprobs": True},
        {"salt": ""},
        {"salt": "\ud800"},
        {"logprobs": 21},
        {"logprobs": -1},
        {"bias": ((VOCAB, 1.0),)},
        {"bias": ((1, float("nan")),)},
        {"presence_penalty": float("inf")},
        {"presence_penalty": 1j},
        {"frequency_penalty": None},
        {"echo": "yes"},
    ],
)
def test_what_can_be_no_request(engine, unchecked, fields):
    with pytest.raises(UserError):
        engine.submit(Request(**{"tokens": (1,), **fields}), Ear())


def test_a_row_that_grows_has_an_end():
    engine = Engine(plain("full"), slots=2, room=64, chunk=16)
    with pytest.raises(UserError, match="holds 64 tokens"):
        engine.submit(Request((1,) * 60, 5), Ear())
    (ear,) = ask(engine, Request((1,) * 60, 4))
    assert len(ear.tokens) == 4


def test_no_numbers_end_one_answer_and_no_other():
    model = plain()

    def forward(w, tokens, positions, valid, states, places):
        logits, states = model.forward(w, tokens, positions, valid, states, places)
        return jnp.where(jnp.any(tokens == 5, axis=1)[:, None, None], jnp.nan, logits), states

    engine = Engine(dataclasses.replace(model, forward=forward), slots=2, chunk=16)
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


def test_in_a_thread_of_its_own():
    engine = Engine(plain(), slots=3, room=2**31 - 1, chunk=16)
    asked = requests(10, 4)
    alone = [ear.tokens for ear in ask(engine, *asked)]
    engine.start()
    try:
        ears = [Ear() for _ in asked]
        for request, ear in zip(asked, ears, strict=True):
            engine.submit(request, ear)
        deadline = time.monotonic() + 60
        while not all(ear.outcomes for ear in ears):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [ear.tokens for ear in ears] == alone
        last = Ear()
        engine.submit(Request((1,), 10**6), last)
    finally:
        engine.stop()
    assert last.outcome.reason == "cancelled"
    with pytest.raises(Overloaded):
        engine.submit(Request((1,), 1), Ear())
    with pytest.raises(RuntimeError, match="starts once"):
        engine.start()


@pytest.mark.parametrize("broken", ["begin", "read", "place", "decode", "tell"])
def test_a_failure_ends_every_answer_once(monkeypatch, broken):
    engine = Engine(plain(), slots=2, chunk=16)

    def fail(*given):
        raise RuntimeError("the device is gone")

    programs = engine._programs
    if broken == "read":
        monkeypatch.setattr(programs, "reads", dict.fromkeys(programs.reads, fail))
    elif broken == "tell":
        monkeypatch.setattr(engine, "_tell", fail)
    else:
        monkeypatch.setattr(programs, broken, fail)
    ears = [Ear() for _ in range(5)]
    for number, ear in enumerate(ears):
        engine.submit(Request((1, 2, 3), number, echo=True), ear)
    with pytest.raises(RuntimeError, match="the device is gone"):
        finish(engine)
    assert {ear.outcome.reason for ear in ears} <= {"error", "length"}
    assert not engine.healthy and engine.running == engine.waiting == 0
    with pytest.raises(Overloaded, match="the device is gone"):
        engine.submit(Request((1,), 1), Ear())


def test_many_small_prompts_do_not_hold_up_a_stream():
    engine = Engine(plain(), slots=64, chunk=16, turn=128)
    ear = Ear()
    engine.submit(Request((1,), 200), ear)
    for _ in range(3):
        engine.step()
    for number in range(100):
        engine.submit(Request((1,), 0, seed=number), Ear())
    turns, before = 0, len(ear.tokens)
    while engine.waiting:
        engine.step()
        turns += 1
    assert turns >= 100 * (16 + 32) / (128 + 48), "each is charged for what it takes"
    assert len(ear.tokens) - before >= turns - 1
    finish(engine)


def test_more_at_once_than_the_queue_takes():
    engine = Engine(plain(), slots=2, chunk=16, queue=3)
    asked = requests(12, 8)
    alone = [ask(engine, request)[0].tokens for request in asked]
    assert [one.tokens for one in answer(engine, asked)] == alone
    with pytest.raises(UserError):
        answer(engine, [*asked[:2], Request((VOCAB,), 1)])
    finish(engine)
    assert engine.running == engine.waiting == 0
    assert answer(engine, []) == []


def test_a_listener_cannot_stop_the_engine_that_calls_it():
    engine = Engine(plain(), slots=1, chunk=16)

    class Stops(Ear):
        def token(self, scored):
            engine.stop()
            return super().token(scored)

    engine.start()
    ear = Stops()
    engine.submit(Request((1,), 3), ear)
    deadline = time.monotonic() + 60
    while not ear.outcomes:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (ear.outcome.reason, engine.healthy) == ("error", True)
    engine.stop()
    with pytest.raises(RuntimeError, match="starts once"):
        engine.start()


def test_a_listener_that_lacks_a_call_loses_its_answer_alone(engine, unchecked):
    class Deaf:
        outcome = None

        def token(self, scored):
            return False

        def done(self, outcome):
            self.outcome = outcome

    deaf, ear = Deaf(), Ear()
    engine.submit(Request((1, 2), 2, logprobs=1, echo=True), deaf)
    engine.submit(Request((1, 2), 2), ear)
    finish(engine)
    assert deaf.outcome.reason == "error" and "prompt" in deaf.outcome.error
    assert ear.outcome.reason == "length" and engine.healthy


def test_a_chunk_that_would_compute_padding_for_minutes_is_refused():
    with pytest.raises(UserError, match="at most 4096"):
        Engine(plain(), chunk=10**6)
