"""Answers of both routes, whole and streamed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from jaxkv import __version__
from jaxkv.sampling import Sampling
from tests.serve.http.conftest import events, serving
from tests.serve.http.fake import BOS, EOS, TEMPLATE, FakeEngine, language, logprob


def test_a_completion(served):
    answer = served.complete("Say|hello")
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    reply = answer.json
    assert reply["id"].startswith("cmpl-") and reply["object"] == "text_completion"
    assert reply["model"] == "bytes" and reply["created"] > 1_700_000_000
    assert reply["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}
    ]
    # The BOS and the EOS count.
    usage = {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}
    assert reply["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    again = served.complete("Say|hello").json
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 9}
    assert again["id"] != reply["id"]


def test_a_chat(served):
    reply = served.chat("Say|hello").json
    assert reply["id"].startswith("chatcmpl-") and reply["object"] == "chat.completion"
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert reply["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    ]


def test_a_chat_template_renders_the_messages():
    with serving(FakeEngine(), language(TEMPLATE)) as served:
        parts = [{"type": "text", "text": text} for text in ("Say", "|hi")]
        messages = [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": parts},
        ]
        reply = served.ask("POST", "/v1/chat/completions", {"model": "bytes", "messages": messages})
        assert reply.json["choices"][0]["message"]["content"] == "hi"
        (request,) = served.engine.requests
        rendered = b"[system]Be short.[user]Say|hi[assistant]"
        assert request.tokens == (BOS, *rendered)  # without a second BOS


def test_a_request_without_settings_is_sampled_as_the_model_says():
    with serving(FakeEngine(), sampling=Sampling(0.6, 20, 0.9)) as served:
        served.complete("|x", max_tokens=1)
        served.complete("|x", max_tokens=1, temperature=0, top_p=1)
        settings = [request.sampling for request in served.engine.requests]
    assert settings == [Sampling(0.6, 20, 0.9), Sampling(0, 20, 1)]


def test_every_setting_reaches_the_engine(served):
    served.complete(
        "|x", temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1, seed=3,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"65": -100, "66": 2.5},
        ignore_eos=True, cache_salt="pepper", user="me", max_tokens=3, best_of=1,
    )  # fmt: skip
    request = served.engine.requests[-1]
    assert vars(request.sampling) == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1
    }  # fmt: skip
    assert (request.presence_penalty, request.frequency_penalty) == (0.5, -0.5)
    served.complete("|x", top_k=-1)  # as vLLM's clients say "all tokens"
    assert served.engine.requests[-1].sampling.top_k == 0
    assert request.bias == ((65, -100), (66, 2.5))
    assert (request.seed, request.eos, request.salt) == (3, (), "pepper")


def test_several_answers_to_several_prompts(served):
    reply = served.complete(["one", "two"], n=3, seed=2**32 - 2, max_tokens=11).json
    first = [choice["text"].split()[0] for choice in reply["choices"]]
    assert first == ["4294967294", "4294967295", "0"] * 2
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 6
    # A prompt counts once, whatever the number of its answers.
    assert reply["usage"]["prompt_tokens"] == 8 and reply["usage"]["completion_tokens"] == 66


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(served, stream):
    """A stop string over several tokens, partial stop strings, and text after the stop string."""
    stop = ["END", "naïve", "\n\n"]
    answer = served.complete("|ENnaïf nai\nDénaïve END ✓", stop=stop, stream=stream)
    reply = events(answer.raw) if stream else [answer.json]
    choices = [event["choices"][0] for event in reply]
    assert "".join(choice["text"] for choice in choices) == "ENnaïf nai\nDé"
    assert choices[-1]["finish_reason"] == "stop"


def test_a_stream_never_splits_a_character(served):
    text = "Grüße ✓ 🎈 𝒞"
    answer = served.complete(f"|{text}", stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    pieces = [event["choices"][0]["text"] for event in events(answer.raw)]
    assert "".join(pieces) == text and len(pieces) == len(text) + 1
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_becomes_a_replacement_character(served):
    """At the end of a truncated answer, and for bytes that are not UTF-8."""
    assert served.complete("|✓", max_tokens=2).json["choices"][0]["text"] == "\ufffd"
    broken = served.complete([ord("|"), 0xFF, ord("x")]).json["choices"][0]["text"]
    assert broken == "\ufffdx"


def test_a_stream_of_a_chat(served):
    reply = events(served.chat("|hi", stream=True, stream_options={"include_usage": True}).raw)
    first, *_, last, usage = reply
    assert {event["object"] for event in reply} == {"chat.completion.chunk"}
    assert len({event["id"] for event in reply}) == 1
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"] for event in reply[1:-2]] == [
        {"content": "h"}, {"content": "i"}
    ]  # fmt: skip
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
    assert [event["usage"] for event in reply[:-1]] == [None] * (len(reply) - 1)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3


def test_a_stream_of_several_answers(served):
    reply = events(served.complete(["a|b", "c|de"], n=2, stream=True).raw)
    texts = ["", "", "", ""]
    for event in reply:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["b", "b", "de", "de"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Grüße|x", [BOS, *"Grüße|x".encode()]])
def test_echo(served, prompt, stream):
    answer = served.complete(prompt, echo=True, stream=stream)
    reply = events(answer.raw) if stream else [answer.json]
    assert "".join(event["choices"][0]["text"] for event in reply) == "Grüße|xx"
    assert not served.engine.requests[-1].echo  # the echo needs no scores


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(served, stream):
    answer = served.complete("é|ab", echo=True, logprobs=2, stream=stream)
    reply = events(answer.raw) if stream else [answer.json]
    parts = [event["choices"][0]["logprobs"] for event in reply]
    logprobs = {
        name: [item for part in parts if part for item in part[name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    ids = [BOS, *"é|ab".encode(), *b"ab", EOS]
    names = ["<s>", "bytes:\\xc3", "bytes:\\xa9", "|", "a", "b", "a", "b", "</s>"]
    assert logprobs["tokens"] == names
    values = [logprob(*pair) for pair in pairwise(ids)]
    assert logprobs["token_logprobs"] == [None, *values]
    assert logprobs["text_offset"] == [0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert logprobs["top_logprobs"][0] is None
    for name, value, top in zip(names[1:], values, logprobs["top_logprobs"][1:], strict=True):
        assert top[name] == value and max(top.values()) == -1 and len(top) in (2, 3)
    assert "".join(event["choices"][0]["text"] for event in reply) == "é|abab"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(served, stream):
    answer = served.chat("|✓", logprobs=True, top_logprobs=2, stream=stream)
    reply = events(answer.raw) if stream else [answer.json]
    parts = [event["choices"][0]["logprobs"] for event in reply]
    content = [item for part in parts if part for item in part["content"]]
    assert [item["bytes"] for item in content] == [[0xE2], [0x9C], [0x93], [*b"</s>"]]
    assert content[0]["token"] == "bytes:\\xe2" and content[-1]["token"] == "</s>"
    assert all(len(item["top_logprobs"]) == 2 for item in content)
    assert all(item["top_logprobs"][0]["logprob"] == -1 for item in content)


def test_tokens_cut_off_by_a_stop_string_have_logprobs(served):
    """The number of entries equals completion_tokens."""
    reply = served.complete("|a END", stop=" END", logprobs=0).json
    assert reply["choices"][0]["text"] == "a"
    assert reply["choices"][0]["logprobs"]["tokens"] == ["a", " ", "E", "N", "D"]
    assert reply["choices"][0]["logprobs"]["text_offset"] == [6, 7, 8, 9, 10]
    assert reply["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("prompt", ["Grüße|✓", [BOS, *"Grüße|✓".encode()]])
@pytest.mark.parametrize("echo", [False, True])
def test_text_offset_counts_from_the_beginning_of_the_prompt(served, prompt, echo):
    """As in OpenAI's responses, also without an echo."""
    choice = served.complete([prompt], logprobs=0, echo=echo).json["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[-4:] == [7, 7, 7, 8] and len(offsets) == (16 if echo else 4)


def test_cached_tokens_can_be_left_out():
    with serving(FakeEngine(), report_cached=False) as served:
        assert "prompt_tokens_details" not in served.complete("|x").json["usage"]


def test_other_routes(served):
    card = {"id": "bytes", "object": "model", "created": 1, "owned_by": "jaxkv"}
    assert served.ask("GET", "/v1/models").json["data"] == [card | {"max_model_len": 100_000}]
    assert served.ask("GET", "/v1/models/bytes").json["id"] == "bytes"
    assert served.ask("GET", "/v1/models/org/other").error["code"] == "model_not_found"
    assert served.ask("GET", "/version").json == {"version": __version__}
    assert served.ask("GET", "/health").status == 200


def test_an_unhealthy_engine_gives_503():
    with serving(FakeEngine()) as served:
        served.engine.healthy = False
        answer = served.ask("GET", "/health")
        assert answer.status == 503 and answer.error["type"] == "server_error"
        answer = served.complete("|x")
        assert (answer.status, answer.error["code"]) == (503, "engine_unhealthy")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_detokenizer_ends_its_answer(monkeypatch, stream):
    def fails(row, reason):
        raise RuntimeError

    words = language()
    monkeypatch.setattr(type(words.detokenizer((), ())), "end", fails)
    with serving(FakeEngine(), words) as served:
        answer = served.complete("endless", stream=stream, max_tokens=3)
        assert b"the engine failed" in answer.raw
        assert stream or answer.status == 500


def test_too_many_answers_are_refused_before_tokenization(monkeypatch):
    words = language()
    monkeypatch.setattr(type(words), "encode", lambda *_: pytest.fail("tokenized"))
    with serving(FakeEngine(), words, max_in_flight=8) as served:
        assert served.complete(["x"] * 5, n=2).error["param"] == "n"
        assert served.complete(["x"] * 9).error["param"] == "prompt"


def test_too_many_ids_are_refused_before_decoding(monkeypatch):
    words = language()
    monkeypatch.setattr(type(words), "pieces", lambda *_: pytest.fail("decoded"))
    with serving(FakeEngine(max_len=100), words) as served:
        error = served.complete([65] * 100, echo=True, max_tokens=1).error
        assert error["code"] == "context_length_exceeded"


def test_stop_token_ids_end_an_answer(served):
    """Also with ignore_eos; their text is left out, as that of an EOS."""
    for fields in ({}, {"ignore_eos": True}):
        reply = served.complete("|abc", stop_token_ids=[ord("c"), 5], **fields).json
        assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("ab", "stop")
        assert reply["usage"]["completion_tokens"] == 3


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(served):
    reply = served.complete("|a.b.c", stop=".", min_tokens=3).json
    assert reply["choices"][0]["text"] == "a.b"
    assert served.engine.requests[-1].min_new_tokens == 3


def test_other_names_of_the_model():
    """Answers state the first."""
    with serving(FakeEngine(), aliases=("gpt", "a/b")) as served:
        assert served.complete("|x", model="gpt").json["model"] == "bytes"
        cards = served.ask("GET", "/v1/models").json["data"]
        assert [card["id"] for card in cards] == ["bytes", "gpt", "a/b"]
        assert served.ask("GET", "/v1/models/a/b").json["id"] == "a/b"
