"""A server whose cache is bounded, so that texts have no limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxkv.server.job import TOTAL, WHOLE_TOKENS
from tests.server.conftest import Served, eventually, serving
from tests.server.fake import FakeEngine


@pytest.fixture(scope="module")
def unlimited() -> Iterator[Served]:
    with serving(FakeEngine(max_len=None)) as served:
        yield served


def test_the_model_card_has_no_length(unlimited):
    assert unlimited.ask("GET", "/v1/models").json["data"][0]["max_model_len"] is None


def test_a_stream_has_no_end_until_its_client_leaves(unlimited):
    with unlimited.client() as client:
        stream = client.completions.create(
            model="bytes", prompt="endless", max_tokens=2**31 - 1, temperature=0, stream=True
        )
        for _, _ in zip(range(3000), stream, strict=False):
            pass
        assert unlimited.engine.requests[-1].max_new_tokens == 2**31 - 1
        stream.close()
    eventually(lambda: not unlimited.engine.handles)


def test_a_whole_answer_has_a_limit_of_tokens(unlimited):
    error = unlimited.complete("|x", max_tokens=WHOLE_TOKENS + 1).error
    assert error["param"] == "max_tokens" and "stream the answer" in error["message"]
    assert unlimited.complete("|x", max_tokens=WHOLE_TOKENS).json["choices"][0]["text"] == "x"


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
    assert unlimited.complete("x" * TOTAL + "|y").status == 400
    assert unlimited.complete("x" * (TOTAL - 2) + "|y").json["choices"][0]["text"] == "y"
