"""Invalid requests get a status and an error object with a one-line message; the server goes on."""

from __future__ import annotations

import gzip
import json

import pytest

GOOD = {"model": "bytes", "prompt": "|x"}
TALK = {"model": "bytes", "messages": [{"role": "user", "content": "|x"}]}
HUGE = 10**30

# The raw body, and words of the error message.
BODIES = {
    "not JSON": (b"{model:", "must be JSON"),
    "nothing": (b"", "must be JSON"),
    "two values": (b"{} {}", "must be JSON"),
    "not an object": (b"[1]", "must be a JSON object", "[1]"),
    "a number": (b"7", "must be a JSON object"),
    "not UTF-8": (b'{"model": "\xff"}', "must be UTF-8", "byte 11"),
    "UTF-16": (json.dumps(GOOD).encode("utf-16"), "must be UTF-8"),
    "a BOM": (b"\xef\xbb\xbf{}", "must be JSON"),
    "NaN": (b'{"model": "bytes", "prompt": "x", "temperature": NaN}', "no NaN"),
    "Infinity": (b'{"model": "bytes", "prompt": "x", "temperature": -Infinity}', "no -Infinity"),
    "beyond doubles": (b'{"model": "bytes", "prompt": "x", "temperature": 1e999}', "got inf"),
    "digits": (b'{"seed": 1%b}' % (b"0" * 5000), "too many digits"),
    "nested": (b'{"model": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", "nested too deeply"),
    "nested and valid": (
        b'{"model": "bytes", "prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "prompt must be a text"
    ),
    "a name twice": (b'{"prompt": "a", "model": "bytes", "prompt": "b"}', "'prompt' is given"),
    "a name twice within": (
        b'{"model": "bytes", "prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "'1' is given twice"
    ),
    "a long name": (b'{"%b": 1}' % (b"x" * 100_000), "unknown or unsupported", "..."),
    "a line end": (b'{"a\\nb\\ud800": 1}', r"'a\nb\ud800'"),
    "a lone surrogate": (b'{"model": "bytes", "prompt": "\\ud800"}', "prompt must be", "surrogate"),
    "a lone surrogate in a stop string": (
        b'{"model": "bytes", "prompt": "|x", "stop": [1, "\\ud800"]}', "stop must be a text"
    ),
}  # fmt: skip

# Fields of a completion, the error's `param`, and words of its message.
COMPLETIONS = {
    "unknown": ({"tempreature": 1}, "tempreature", "unknown or unsupported field 'tempreature'"),
    "field of chats": ({"messages": []}, "messages", "unknown or unsupported"),
    "format": (
        {"response_format": {"type": "json_object"}}, "response_format", "does not constrain tokens"
    ),
    "no prompt": ({"prompt": None}, "prompt", "missing"),
    "a number for a prompt": ({"prompt": 5}, "prompt", "a text, a list of token ids"),
    "no prompts": ({"prompt": []}, "prompt", "got []"),
    "an empty prompt": ({"prompt": [[]]}, "prompt", "got [[]]"),
    "texts and ids": ({"prompt": ["a", [1]]}, "prompt", "a list of either"),
    "booleans for ids": ({"prompt": [True, False]}, "prompt", "got [True, False]"),
    "fractions for ids": ({"prompt": [1.5]}, "prompt", "got [1.5]"),
    "an id too large": ({"prompt": [1, 259]}, "prompt", "from 0 to 258"),
    "an id below 0": ({"prompt": [[-1]]}, "prompt", "from 0 to 258"),
    "a huge id": ({"prompt": [HUGE]}, "prompt", "from 0 to 258"),
    "tokens below 0": ({"max_tokens": -2}, "max_tokens", "from 0 to", "got -2"),
    "many tokens": ({"max_tokens": HUGE}, "max_tokens", "from 0 to 2147483647"),
    "fraction for a number": ({"max_tokens": 1.5}, "max_tokens", "whole number"),
    "a text for a number": ({"max_tokens": "5"}, "max_tokens", "whole number", "'5'"),
    "true for a number": ({"max_tokens": True}, "max_tokens", "whole number", "True"),
    "temperature below 0": ({"temperature": -0.1}, "temperature", "from 0 to 2"),
    "temperature above 2": ({"temperature": HUGE}, "temperature", "from 0 to 2"),
    "top_p of 0": ({"top_p": 0}, "top_p", "above 0"),
    "top_p above 1": ({"top_p": 1.1}, "top_p", "at most 1"),
    "top_k": ({"top_k": -2}, "top_k", "whole number"),
    "min_p": ({"min_p": 2}, "min_p", "from 0 to 1"),
    "repetition": ({"repetition_penalty": 1e-38}, "repetition_penalty", "from 0.01 to 100"),
    "presence": ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
    "frequency": ({"frequency_penalty": "1"}, "frequency_penalty", "a number"),
    "no answers": ({"n": 0}, "n", "from 1 to 128"),
    "answers": ({"n": 129}, "n", "from 1 to 128"),
    "seed below 0": ({"seed": -2}, "seed", "from 0 to 4294967295"),
    "seed": ({"seed": HUGE}, "seed", "from 0 to 4294967295"),
    "stops": ({"stop": ["a"] * 5}, "stop", "at most 4"),
    "an empty stop": ({"stop": ""}, "stop", "1 to 200 characters"),
    "a long stop": ({"stop": "x" * 201}, "stop", "1 to 200 characters"),
    "a stop of numbers": ({"stop": [1]}, "stop", "a text of"),
    "stream": ({"stream": "yes"}, "stream", "true or false"),
    "options without a stream": ({"stream_options": {}}, "stream_options", "stream=false"),
    "options": ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "include_usage"),
    "logprobs": ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    "a flag for logprobs": ({"logprobs": True}, "logprobs", "whole number"),
    "echo": ({"echo": 1}, "echo", "true or false"),
    "best_of": ({"best_of": 2}, "best_of", "must be 1, got 2"),
    "suffix": ({"suffix": "x"}, "suffix", "must be ''"),
    "bias of a text": ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    "bias with a text": ({"logit_bias": {"1": "x"}}, "logit_bias", "from -100 to 100"),
    "bias below 0": ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    "bias above 100": ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    "bias of a huge id": ({"logit_bias": {str(HUGE): 1}}, "logit_bias", "token ids"),
    "bias of an unknown token": ({"logit_bias": {"259": 1}}, "logit_bias", "from 0 to 258"),
    "301 biases": ({"logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "logit_bias", "300"),
    "a lone surrogate": ({"prompt": ["a", "\ud800"]}, "prompt", "valid Unicode", "surrogates"),
    "one token twice": ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "token ids"),
    "min_tokens": ({"min_tokens": 17}, "min_tokens", "at most the 16 new tokens"),
    "stop_token_ids": ({"stop_token_ids": [1, "2"]}, "stop_token_ids", "128 token ids"),
    "an unknown stop token": ({"stop_token_ids": [259]}, "stop_token_ids", "from 0 to 258"),
    "a stop token below 0": ({"stop_token_ids": [-1]}, "stop_token_ids", "from 0 to 258"),
    "metadata": ({"metadata": "x"}, "metadata", "an object"),
    "service_tier": ({"service_tier": "priority"}, "service_tier", "auto, default"),
    "an empty salt": ({"cache_salt": ""}, "cache_salt", "1 to 1000"),
    "a salt": ({"cache_salt": 5}, "cache_salt", "a text"),
    "a salt with a lone surrogate": ({"cache_salt": "\ud800"}, "cache_salt", "valid Unicode"),
    "user": ({"user": {}}, "user", "a text"),
    "special tokens in answers": (
        {"skip_special_tokens": False}, "skip_special_tokens", "must be True"
    ),
    "no model": ({"model": None}, "model", "missing"),
    "model": ({"model": 5}, "model", "a text"),
}  # fmt: skip

CHATS = {
    "a lone surrogate": (
        {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogates"
    ),
    "field of completions": ({"prompt": "x"}, "prompt", "unknown or unsupported"),
    "tools": ({"tools": [{"type": "function"}]}, "tools", "must be []"),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice", "'none' or 'auto'"),
    "modalities": ({"modalities": ["audio"]}, "modalities", "must be ['text']"),
    "variables": ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    "a lone surrogate in a variable": (
        {"chat_template_kwargs": {"x": ["\ud800"]}}, "chat_template_kwargs", "surrogates"
    ),
    "a user's message to continue": (
        {"continue_final_message": True}, "continue_final_message", "assistant, got user"
    ),
    "both": (
        {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt",
        "exclude each other",
    ),
    "echo": ({"echo": True}, "echo", "must be False"),
    "no messages": ({"messages": []}, "messages", "at least one"),
    "a text": ({"messages": "hi"}, "messages", "at least one"),
    "a text for a message": ({"messages": ["hi"]}, "messages[0]", '"role" and "content"'),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0]", "role"),
    "null for content": (
        {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a text"
    ),
    "a role": ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role", "one of system"),
    "a role that is a list": (
        {"messages": [{"role": [], "content": ""}]}, "messages[0].role", "one of"
    ),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content", "parts of type text",
    ),
    "a name": (
        {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name", "a text"
    ),
    "a field of a message": (
        {"messages": [{"role": "user", "content": "x", "audio": {"id": "1"}}]}, "messages[0]",
        "nothing else",
    ),
    "no new tokens": ({"max_tokens": 0}, "max_tokens", "from 1"),
    "no new completion tokens": ({"max_completion_tokens": 0}, "max_completion_tokens", "from 1"),
    "logprobs": ({"logprobs": 1}, "logprobs", "true or false"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    "top_logprobs alone": ({"top_logprobs": 1}, "top_logprobs", "logprobs=false"),
    "format": (
        {"response_format": {"type": "json_object"}}, "response_format", "does not constrain tokens"
    ),
    "store": ({"store": True}, "store", "must be False"),
}  # fmt: skip


@pytest.mark.parametrize("case", BODIES)
def test_bodies(served, case):
    body, *words = BODIES[case]
    answer = served.ask("POST", "/v1/completions", body)
    refused(answer, 400, words)
    served.works()


@pytest.mark.parametrize("case", COMPLETIONS)
def test_fields_of_completions(served, case):
    fields, param, *words = COMPLETIONS[case]
    answer = served.ask("POST", "/v1/completions", GOOD | fields)
    refused(answer, 400, words)
    assert answer.error["param"] == param


@pytest.mark.parametrize("case", CHATS)
def test_fields_of_chats(served, case):
    fields, param, *words = CHATS[case]
    answer = served.ask("POST", "/v1/chat/completions", TALK | fields)
    refused(answer, 400, words)
    assert answer.error["param"] == param


def refused(answer, status, words, kind="invalid_request_error"):
    assert answer.status == status, answer
    error = answer.error
    assert error["type"] == kind
    for word in words:
        assert word in error["message"], error


def test_an_unknown_model(served):
    answer = served.complete("|x", model="gpt-\ud800")
    assert answer.status == 404
    assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")
    assert "'bytes'" in answer.error["message"]


@pytest.mark.parametrize("method, path, status", [
    ("GET", "/v1/completion", 404),
    ("GET", "/", 404),
    ("POST", "/v1/embeddings", 404),
    ("GET", "/v1/completions", 405),
    ("PUT", "/v1/chat/completions", 405),
    ("POST", "/metrics", 405),
    ("DELETE", "/v1/models/bytes", 405),
])  # fmt: skip
def test_unknown_routes_and_methods(served, method, path, status):
    answer = served.ask(method, path, None if method == "GET" else {})
    refused(answer, status, [method, path])
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_content_types_without_cors_preflight_are_refused(served, kind):
    """A web page may send these types to any site without a preflight request."""
    answer = served.ask("POST", "/v1/completions", GOOD, content_type=kind)
    refused(answer, 415, ["application/json"])


def test_a_compressed_body(served):
    packed = gzip.compress(json.dumps(GOOD).encode())
    answer = served.ask("POST", "/v1/completions", packed, content_encoding="gzip")
    refused(answer, 415, ["not be compressed", "gzip"])


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * 100_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_invalid_http(served, raw):
    with served.connect() as connection:
        connection.sendall(raw)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    served.works()


def test_an_invalid_chunk_ends_an_answer_that_has_not_begun(served, caplog):
    """The request has no content type, so an answer of 415 is on its way when the chunk comes."""
    with served.connect() as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"ZZ\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    served.works()
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text


def test_a_full_queue_gives_503(served):
    """Also if the engine has accepted some answers of the request."""
    for prompt in ("!full", ["endless", "endless", "!full"]):
        answer = served.complete(prompt, max_tokens=50_000)
        refused(answer, 503, ["64 requests wait"], "server_error")
        assert answer.headers["retry-after"] == "8"
        served.works()


@pytest.mark.parametrize("chat", [False, True])
def test_an_engine_that_fails(served, chat, caplog):
    ask = served.chat if chat else served.complete
    refused(ask("!fail"), 500, ["the engine failed"], "server_error")
    assert "the model's logits are not finite" in caplog.text
    served.works()


def test_an_engine_that_fails_in_a_stream(served, caplog):
    raw = served.complete("!fail", stream=True, temperature=0).raw
    *_, last, done = raw.decode().removesuffix("\n\n").split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and done == "data: [DONE]"
    served.works()


def test_an_exception_in_the_server_gives_500(served, monkeypatch, caplog):
    """In a whole answer and in a stream."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(served.engine), "submit", fail)
    refused(served.complete("|x"), 500, ["the server failed"], "server_error")
    monkeypatch.undo()
    monkeypatch.setattr("jaxkv.serve.http.choices.AnswerReader.read", fail)
    refused(served.complete("|x"), 500, ["the server failed"], "server_error")
    assert "the server failed" in served.complete("|x", stream=True).raw.decode()
    assert caplog.text.count("RuntimeError: a bug") >= 3
    monkeypatch.undo()
    served.works()
