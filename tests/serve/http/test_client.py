"""The official OpenAI client."""

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


def test_models(client):
    assert [model.id for model in client.models.list()] == ["bytes"]
    assert client.models.retrieve("bytes").owned_by == "jaxkv"


def test_completions(client):
    reply = client.completions.create(model="bytes", prompt="Say|Grüße ✓", max_tokens=50)
    assert reply.choices[0].text == "Grüße ✓" and reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


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


def test_extensions(client, served):
    extra = {"top_k": 5, "cache_salt": "pepper"}
    client.completions.create(model="bytes", prompt="|x", extra_body=extra)
    assert served.engine.requests[-1].sampling.top_k == 5


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


def test_retry_after_is_within_what_the_client_accepts(served):
    with pytest.raises(openai.InternalServerError) as caught, served.client() as client:
        client.completions.create(model="bytes", prompt="!full")
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


def test_keys():
    tenants = parse_api_keys("first\n", "keys")
    with serving(FakeEngine(), tenants=tenants, max_per_key=0) as served:
        with served.client("second") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with served.client("first") as client:
            assert client.models.list().data
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="bytes", prompt="|x")
