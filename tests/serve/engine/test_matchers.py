"""Answers that obey a grammar, beside others that have none."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.sampling import Sampling
from jaxkv.serve.engine import Request
from tests.serve.engine.plain import VOCAB, ask


class Multiples:
    """Allows as the n-th token a multiple of n + 2, and `length` tokens. It fails at `fails`."""

    def __init__(self, length: int, fails: int = -1) -> None:
        self.length, self.fails, self.tokens = length, fails, []

    @property
    def ended(self) -> bool:
        return len(self.tokens) == self.length

    def copy(self):
        return Multiples(self.length, self.fails)

    def allowed(self):
        if len(self.tokens) == self.fails:
            raise UserError("the grammar is too large; give a smaller one")
        return np.arange(VOCAB) % (len(self.tokens) + 2) == 0

    def advance(self, token: int) -> None:
        assert self.allowed()[token], "a token that is not allowed"
        self.tokens.append(token)


def obeying(length, most=40, **settings):
    return Request(
        (1, 2, 3), most, matcher=Multiples(length), sampling=Sampling(temperature=2.0), **settings
    )


def test_an_answer_obeys_its_matcher_and_ends_with_it(engine):
    for length in (1, 2, 3, 9):
        request = obeying(length)
        (listener,) = ask(engine, request)
        assert listener.tokens == request.matcher.tokens
        assert len(listener.tokens) == length
        assert listener.outcome.reason == "eos"
        assert listener.outcome.new_tokens == length


def test_max_new_tokens_ends_an_answer_before_its_matcher(engine):
    (listener,) = ask(engine, obeying(30, most=7))
    assert len(listener.tokens) == 7
    assert listener.outcome.reason == "length"


def test_a_grammar_that_ends_with_the_last_token_ends_the_answer(engine):
    """Whether another request runs or not."""
    (alone,) = ask(engine, obeying(5, most=5))
    beside, _ = ask(engine, obeying(5, most=5), Request((5, 6), 30))
    assert alone.outcome.reason == beside.outcome.reason == "eos"


def test_a_matcher_changes_no_bit_of_other_answers(engine):
    others = [
        Request((5, 6), 30, seed=seed, logprobs=3, sampling=Sampling(temperature=1.0))
        for seed in (1, 2)
    ]
    alone = ask(engine, *others)
    beside = ask(engine, others[0], obeying(12), others[1], obeying(20, seed=3))
    for before, after in zip(alone, (beside[0], beside[2]), strict=True):
        assert after.scored == before.scored
    again = ask(engine, obeying(12), obeying(20, seed=3))
    assert [listener.tokens for listener in again] == [beside[1].tokens, beside[3].tokens]


def test_masks_are_computed_while_the_device_feeds_the_batch(engine, monkeypatch):
    calls, programs = [], engine._programs
    for name in ("feed", "set_bias", "sample"):
        program = getattr(programs, name)

        def called(*arguments, name=name, program=program):
            calls.append(name)
            return program(*arguments)

        monkeypatch.setattr(programs, name, called)
    request = obeying(4)
    monkeypatch.setattr(
        Multiples, "allowed", lambda self, of=Multiples.allowed: (calls.append("mask"), of(self))[1]
    )
    monkeypatch.setattr(Multiples, "advance", lambda self, token: self.tokens.append(token))
    ask(engine, request)
    assert calls == ["mask", *["feed", "mask", "set_bias", "sample"] * 3, "feed"]


def test_a_matcher_that_fails_ends_its_answer_alone(engine):
    failing = Request((1, 2), 20, matcher=Multiples(9, fails=4))
    at_once = Request((1, 2), 20, matcher=Multiples(9, fails=0))
    listener, first, other = ask(engine, failing, at_once, Request((5, 6), 30))
    for failed in (listener, first):
        assert failed.outcome.reason == "refused"
        assert failed.outcome.error == "the grammar is too large; give a smaller one"
    assert len(listener.tokens) <= 4
    assert len(other.tokens) == 30


def test_a_matcher_and_a_minimum_exclude_each_other():
    with pytest.raises(UserError, match="may end early, got min_new_tokens 3"):
        obeying(4, min_new_tokens=3)
