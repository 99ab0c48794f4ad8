"""Requests that an engine refuses, and the limits that it sets."""

from __future__ import annotations

import pytest

from jaxkv.defaults import GROWING_LEN
from jaxkv.errors import UserError
from jaxkv.serve.engine import Engine, Overloaded, Request
from jaxkv.serve.engine.plan import resolve_max_len
from tests.serve.engine.plain import VOCAB, Recorder, ask, finish, plain


def test_a_full_queue_says_when_to_retry():
    engine = Engine(plain(), max_batch=1, chunk=16, queue=2, queue_tokens=50)
    engine.submit(Request((1,) * 40, 4), Recorder())
    engine.submit(Request((1,) * 40, 4), Recorder())  # the request before it takes the batch entry
    with pytest.raises(Overloaded) as many:
        engine.submit(Request((1,) * 20, 4), Recorder())
    assert 1 <= many.value.seconds <= 60
    engine.submit(Request((1,), 4), Recorder())
    with pytest.raises(Overloaded):
        engine.submit(Request((1,), 4), Recorder())
    finish(engine)
    (large,) = ask(engine, Request((1,) * 60, 4))  # a single prompt may exceed queue_tokens
    assert large.outcome.reason == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": ()},
        {"tokens": (VOCAB,)},
        {"tokens": (1.5,)},
        {"tokens": (True,)},
        {"max_new_tokens": -1},
        {"seed": 2**32},
        {"salt": ""},
        {"salt": "\ud800"},
        {"logprobs": 21},
        {"bias": ((VOCAB, 1.0),)},
        {"bias": ((1, float("nan")),)},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": None},
        {"echo": "yes"},
    ],
)
def test_invalid_requests_raise(engine, unchecked, fields):
    with pytest.raises(UserError):
        engine.submit(Request(**{"tokens": (1,), **fields}), Recorder())


def test_a_request_beyond_max_len_raises():
    engine = Engine(plain("full"), max_batch=2, max_len=64, chunk=16)
    with pytest.raises(UserError, match="max_len is 64 tokens"):
        engine.submit(Request((1,) * 60, 5), Recorder())
    (listener,) = ask(engine, Request((1,) * 60, 4))
    assert len(listener.tokens) == 4


def test_only_growing_caches_have_a_limit_by_default():
    assert resolve_max_len(plain("full").policies, None) == GROWING_LEN
    assert resolve_max_len(plain("0=full;*=streaming:sinks=2,window=14").policies, None)
    engine = Engine(plain(), max_batch=1, chunk=16)
    assert engine.max_len is None
    (listener,) = ask(engine, Request((1,) * 50, 500))
    assert len(listener.tokens) == 500
    handle = engine.submit(Request((1,) * 5000, 2**31 - 1), Recorder())
    engine.cancel(handle)
    finish(engine)


def test_no_eos_comes_before_min_new_tokens(engine):
    """The next sampled token may be one; other requests of the batch do not change."""
    (free,) = ask(engine, Request((1, 2, 3), 12))
    for first in (0, 1, 2, 7, 12):
        ends = tuple(set(free.tokens))
        held, beside = ask(
            engine,
            Request((1, 2, 3), 12, min_new_tokens=first, eos=ends, bias=((ends[0], 3.0),)),
            Request((1, 2, 3), 12),
        )
        assert not set(held.tokens[:first]) & set(ends) and len(held.tokens) >= first
        assert beside.tokens == free.tokens
        if 0 < first < 12:
            assert len(held.tokens) <= 12 and held.outcome.reason in ("eos", "length")
    always = tuple((token, 1e4) for token in (5,))
    for first in (0, 1, 2, 5, 9):
        (listener,) = ask(engine, Request((7,), 9, min_new_tokens=first, eos=(5,), bias=always))
        assert listener.tokens.index(5) == first if first < 9 else 5 not in listener.tokens
    with pytest.raises(UserError, match="min_new_tokens"):
        Request((1,), 3, min_new_tokens=4)
