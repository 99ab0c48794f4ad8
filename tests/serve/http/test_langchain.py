"""LangChain's chat model and its completions, unchanged but for the address."""

from __future__ import annotations

import pytest

from tests.serve.http.conftest import serving
from tests.serve.http.fake import TEMPLATE, FakeEngine, language

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def settings(served):
    return {"base_url": url(served), "api_key": "none", "model": "bytes", "max_retries": 0}


def url(served):
    return f"http://127.0.0.1:{served.port}/v1"


def test_a_chat_model(settings):
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    with serving(FakeEngine(), language(TEMPLATE)) as served:
        chat = ChatOpenAI(**settings | {"base_url": url(served)}, temperature=0, seed=1)
        said = [SystemMessage("Be brief."), HumanMessage("one"), AIMessage("two")]
        reply = chat.invoke([*said, HumanMessage("|Grüße ✓|")])
        assert "Grüße ✓" in reply.content
        assert reply.response_metadata["finish_reason"] in ("stop", "length")
        used = reply.usage_metadata
        assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]


def test_a_stream_and_a_batch(settings):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(**settings, stream_usage=True)
    pieces = list(chat.stream("|one ✓ two"))
    assert "".join(piece.content for piece in pieces) == "one ✓ two"
    used = [piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata]
    assert used == [12]
    assert [message.content for message in chat.batch(["|a", "|b", "|c"])] == ["a", "b", "c"]


def test_completions(settings):
    from langchain_openai import OpenAI

    words = OpenAI(**settings, max_tokens=50)
    assert words.invoke("Say|hi") == "hi"
    assert "".join(words.stream("|one two")) == "one two"


def test_what_the_server_refuses_is_its_message(settings):
    import openai
    from langchain_openai import ChatOpenAI

    with pytest.raises(openai.BadRequestError, match="tools"):
        ChatOpenAI(**settings).bind_tools([{"type": "function", "function": {"name": "f"}}]).invoke(
            "x"
        )
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        ChatOpenAI(**settings | {"model": "gpt"}).invoke("x")
