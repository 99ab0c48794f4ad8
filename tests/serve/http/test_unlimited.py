"""A server whose cache is bounded: texts may be as long as the server allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxkv.defaults import MAX_TOKENS
from jaxkv.serve.http.job import TOTAL
from tests.serve.http.conftest import Served, eventually, serving
from tests.serve.http.fake import FakeEngine


@pytest.fixture(scope="module")
def unlimited() -> Iterator[Served]:
    with serving(FakeEngine(max_len=None)) as served:
        yield served


def test_the_model_card_has_no_length(unlimited):
    assert unlimited.ask("GET", "/v1/models").json["data"][0]["max_model_len"] is None


def test_a_stream_goes_on_until_its_client_leaves(unlimited):
    with unlimited.client() as client:
        stream = client.completions.create(
            model="bytes", prompt="endless", max_tokens=MAX_TOKENS, temperature=0, stream=True
        )
        for _, _ in zip(range(3000), stream, strict=False):
            pass
        assert unlimited.engine.requests[-1].max_new_tokens == MAX_TOKENS
        stream.close()
    eventually(lambda: not unlimited.engine.handles)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_a_limit_of_tokens(unlimited, stream):
    answer = unlimited.complete("|x", max_tokens=MAX_TOKENS + 1, stream=stream, ignore_eos=True)
    assert answer.status == 400 and answer.error["param"] == "max_tokens"
    assert str(MAX_TOKENS) in answer.error["message"]
    assert unlimited.complete("|x", max_tokens=MAX_TOKENS).json["choices"][0]["text"] == "x"


def test_a_prompt_has_a_limit_of_tokens(unlimited):
    before = len(unlimited.engine.requests)
    for answer, param in (
        (unlimited.complete([65] * (MAX_TOKENS + 1)), "prompt"),
        (unlimited.complete([[65], [65] * (MAX_TOKENS + 1)]), "prompt"),
        (unlimited.complete("x" * (MAX_TOKENS + 1)), "prompt"),
        (unlimited.chat("x" * (MAX_TOKENS + 1)), "messages"),
    ):
        assert answer.status == 400 and answer.error["param"] == param
        assert answer.error["code"] == "context_length_exceeded"
        assert f"{MAX_TOKENS} tokens" in answer.error["message"]
    assert len(unlimited.engine.requests) == before
    longest = [65] * (MAX_TOKENS - 2) + [*b"|x"]
    assert unlimited.complete(longest).json["choices"][0]["text"] == "x"


def test_a_chat_message_without_a_limit_has_4096_tokens(unlimited):
    assert unlimited.chat("|x").json["choices"][0]["message"]["content"] == "x"
    assert unlimited.engine.requests[-1].max_new_tokens == 4096


def test_a_prompt_has_a_limit_of_characters(unlimited):
    for answer, param in (
        (unlimited.complete("x" * (TOTAL + 1)), "prompt"),
        (unlimited.complete(["x" * TOTAL, "y"]), "prompt"),
        (unlimited.chat("x" * (TOTAL + 1)), "messages"),
    ):
        assert answer.status == 400
        assert answer.error["param"] == param and str(TOTAL) in answer.error["message"]
