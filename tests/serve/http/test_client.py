"""The official OpenAI client, and LangChain's chat model and completions, unchanged."""

from __future__ import annotations

import openai
import pytest

from jaxkv.serve.http import parse_api_keys
from tests.serve.http.conftest import serving
from tests.serve.http.fake import TEMPLATE, FakeEngine, language


@pytest.fixture(scope="module")
def client(served):
    with served.client() as client:
        yield client


def test_chat(client):
    reply = client.chat.completions.create(
        model="bytes", messages=[{"role": "user", "content": "Say|hi"}], logprobs=True
    )
    assert reply.choices[0].message.content == "hi"
    assert [token.token for token in reply.choices[0].logprobs.content] == ["h", "i", "</s>"]
    said = [{"role": "user", "content": "Say|hi"}, reply.choices[0].message]
    with pytest.raises(openai.BadRequestError, match="no chat template"):  # roles would be lost
        client.chat.completions.create(model="bytes", messages=said)
    with serving(FakeEngine(), language(TEMPLATE)) as served, served.client() as client:
        client.chat.completions.create(model="bytes", messages=said)  # unchanged


def test_streams(client):
    text = "one ✓ two"
    with client.completions.create(
        model="bytes", prompt=f"|{text}", max_tokens=50, stream=True
    ) as stream:
        assert "".join(event.choices[0].text for event in stream) == text
    with client.chat.completions.create(
        model="bytes", messages=[{"role": "user", "content": f"|{text}"}], stream=True,
        stream_options={"include_usage": True}, n=2,
    ) as stream:  # fmt: skip
        reply = list(stream)
    assert reply[0].choices[0].delta.role == "assistant"
    assert reply[-1].usage.completion_tokens == 2 * 12
    texts = ["", ""]
    for event in reply[:-1]:
        (choice,) = event.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == [text, text]


def test_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.completions.create(model="gpt", prompt="|x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="bytes", prompt="|x", temperature=3)
    said = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="bytes", messages=said, tools=[{"type": "function"}])
    with pytest.raises(openai.InternalServerError, match="64 requests wait"):
        client.completions.create(model="bytes", prompt="!full")


def test_an_error_in_a_stream(client, caplog):
    with (
        client.completions.create(model="bytes", prompt="!fail", stream=True) as stream,
        pytest.raises(openai.APIError, match="the engine failed"),
    ):
        list(stream)


def test_keys():
    tenants = parse_api_keys("first\n", "keys")
    with serving(FakeEngine(), tenants=tenants, max_per_key=0) as served:
        with served.client("second") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with served.client("first") as client:
            assert client.models.list().data
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="bytes", prompt="|x")


@pytest.fixture(scope="module")
def settings(served):
    return {"base_url": url(served), "api_key": "none", "model": "bytes", "max_retries": 0}


def url(served):
    return f"http://127.0.0.1:{served.port}/v1"


@pytest.mark.parity
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


@pytest.mark.parity
def test_a_stream_and_a_batch(settings):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(**settings, stream_usage=True)
    pieces = list(chat.stream("|one ✓ two"))
    assert "".join(piece.content for piece in pieces) == "one ✓ two"
    used = [piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata]
    assert used == [12]
    assert [message.content for message in chat.batch(["|a", "|b", "|c"])] == ["a", "b", "c"]


@pytest.mark.parity
def test_completions(settings):
    from langchain_openai import OpenAI

    words = OpenAI(**settings, max_tokens=50)
    assert words.invoke("Say|hi") == "hi"
    assert "".join(words.stream("|one two")) == "one two"


@pytest.mark.parity
def test_what_the_server_refuses_is_its_message(settings):
    import openai
    from langchain_openai import ChatOpenAI

    with pytest.raises(openai.BadRequestError, match="tools"):
        ChatOpenAI(**settings).bind_tools([{"type": "function", "function": {"name": "f"}}]).invoke(
            "x"
        )
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        ChatOpenAI(**settings | {"model": "gpt"}).invoke("x")
