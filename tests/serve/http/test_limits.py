"""Requests beyond a limit of the server: long texts, large and missing bodies, too many answers."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from jaxkv.defaults import MAX_TOKENS
from jaxkv.models.generation.serving import Language
from jaxkv.serve.http import parse_api_keys
from tests.serve.http.conftest import POST, eventually, serving
from tests.serve.http.fake import FakeEngine
from tests.serve.http.test_fields import GOOD, refused


@pytest.fixture
def tokenized(monkeypatch):
    """The lengths of the texts that were tokenized."""
    lengths, encode = [], Language.encode
    count = lambda self, text: lengths.append(len(text)) or encode(self, text)
    monkeypatch.setattr(Language, "encode", count)
    return lengths


def test_prompts_that_are_too_long_together_are_not_tokenized(tokenized):
    with serving(FakeEngine(max_len=20)) as served:
        for answer in (served.complete(["x" * 300_000] * 4), served.chat("x" * 1_200_000)):
            refused(answer, 400, ["may have 1048576 characters together", "got 1200"])
            assert answer.error["code"] == "context_length_exceeded"
        assert not tokenized


def test_prompts_after_one_that_is_too_long_are_not_tokenized(tokenized):
    with serving(FakeEngine(max_len=20), max_batch=1, max_waiting_tokens=10) as served:
        refused(served.complete(["x" * 30] * 200), 400, ["may have 20 tokens together"])
        refused(served.complete(["abc"] * 200, max_tokens=1), 400, ["10 tokens together, got 12"])
        assert tokenized == [30, 3, 3, 3, 3]


def test_prompts_beyond_max_len():
    with serving(FakeEngine(max_len=20)) as served:
        for fields in ({}, {"max_tokens": 12}, {"echo": True, "logprobs": 1, "max_tokens": 100}):
            answer = served.complete("12345678" if "max_tokens" in fields else "x" * 20, **fields)
            refused(answer, 400, ["may have 20 tokens together"])
            assert answer.error["code"] == "context_length_exceeded"
        answer = served.chat("y" * 40)
        assert (answer.error["code"], answer.error["param"]) == (
            "context_length_exceeded", "messages"
        )  # fmt: skip
        # The default of max_tokens is what remains of max_len.
        assert served.complete("12345678", max_tokens=11).status == 200
        reply = served.complete("12345678", max_tokens=None, ignore_eos=True).json
        assert reply["usage"]["completion_tokens"] == 11
        served.works()


def test_bodies_beyond_the_limit():
    """By its content-length, and chunk by chunk without one."""
    with serving(FakeEngine(), max_body=10_000) as served:
        answer = served.complete("x" * 20_000)
        refused(answer, 413, ["at most 10000 bytes"])
        with served.connect() as connection:
            connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(11):
                connection.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
            assert b" 413 " in connection.recv(1000)
        served.works()


def test_a_huge_content_length_is_refused_at_once(served):
    with served.connect() as connection:
        connection.sendall(POST + b"Content-Length: 99999999999999\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")  # and no 100 before it
    served.works()


def test_a_body_that_does_not_arrive():
    with serving(FakeEngine(), read_seconds=0.2) as served, served.connect() as connection:
        connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        reply = b"".join(
            iter(lambda: connection.recv(1000), b"")
        )  # until the server closes the connection
        assert b" 408 " in reply and b"within 0.2 s" in reply
        served.works()


NO_BODY = POST + b"Authorization: Bearer %b\r\nContent-Length: 100\r\n\r\n"


def test_requests_without_bodies_do_not_lock_others_out():
    """More than there may be answers; the oldest get 503 when too many bodies are coming."""
    with (
        serving(FakeEngine(), max_in_flight=4, max_bodies=8) as served,
        contextlib.ExitStack() as opened,
    ):
        stalled = [opened.enter_context(served.connect()) for _ in range(12)]
        for connection in stalled:
            connection.sendall(NO_BODY % b"none")
        assert served.complete("|x").status == 200
        for connection in stalled[:4]:
            reply = b"".join(iter(lambda c=connection: c.recv(1000), b""))
            assert b" 503 " in reply and b"more than 8 bodies" in reply
        assert served.complete("|x").status == 200
        served.works()


def test_the_key_with_most_bodies_loses_one():
    tenants = parse_api_keys("greedy\nmodest", "keys")
    with (
        serving(FakeEngine(), tenants=tenants, max_bodies=4) as served,
        contextlib.ExitStack() as opened,
    ):
        modest, *greedy = (opened.enter_context(served.connect()) for _ in range(7))
        modest.sendall(NO_BODY % b"modest")
        time.sleep(0.05)
        for connection in greedy:
            connection.sendall(NO_BODY % b"greedy")
            time.sleep(0.02)
        for connection in greedy[:3]:
            assert b" 503 " in connection.recv(1000)
        modest.sendall(json.dumps(GOOD["completions"]).encode().ljust(100))  # the oldest of all
        assert b" 200 " in modest.recv(1000)


def test_too_many_answers():
    with serving(FakeEngine(), max_in_flight=8) as served:
        refused(served.complete(["x"] * 9), 400, ["8 answers", "got 9 (prompts: 9, n: 1)"])
        refused(served.complete(["x"] * 3, n=3), 400, ["got 9 (prompts: 3, n: 3)"])
        assert served.complete(["|x"] * 4, n=2).status == 200


@pytest.fixture(scope="module")
def unlimited():
    """A server whose cache is bounded: texts may be as long as the server allows."""
    with serving(FakeEngine(max_len=None)) as served:
        yield served


def test_a_stream_goes_on_until_its_client_leaves(unlimited):
    assert unlimited.ask("GET", "/v1/models").json["data"][0]["max_model_len"] is None
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
