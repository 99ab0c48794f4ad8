"""Invalid requests get a status and an error object with a one-line message; the server goes on.

Every field of the client is applied, accepted if it asks for nothing, or refused by name.
"""

from __future__ import annotations

import gzip
import inspect
import json

import openai
import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from jaxkv.serve.http.errors import APIError
from jaxkv.serve.http.fields import FIELDS, IGNORED, STREAM_OPTIONS, validate
from tests.serve.http.conftest import chat_prompt, events, serving
from tests.serve.http.fake import TEMPLATE, FakeEngine, language

TALK = [{"role": "user", "content": "a|b"}]
GOOD = {"completions": {"model": "bytes", "prompt": "a|b"},
        "chat": {"model": "bytes", "messages": TALK}}  # fmt: skip
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
HUGE = 10**30

# The raw body, and words of the error message.
BODIES = {
    "not JSON": (b"{model:", "must be JSON"),
    "not UTF-8": (b'{"model": "\xff"}', "must be UTF-8", "byte 11"),
    "NaN": (b'{"model": "bytes", "prompt": "x", "temperature": NaN}', "no NaN"),
    "digits": (b'{"seed": 1%b}' % (b"0" * 5000), "too many digits"),
    "nested": (b'{"model": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", "nested too deeply"),
    "a name twice within": (
        b'{"model": "bytes", "prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "'1' is given twice"
    ),
    "a long name": (b'{"%b": 1}' % (b"x" * 100_000), "unknown or unsupported", "..."),
}  # fmt: skip

# Fields of a completion, the error's `param`, and words of its message: a case for each check.
COMPLETIONS = {
    "unknown": ({"tempreature": 1}, "tempreature", "unknown", "did you mean temperature?"),
    "format": ({"response_format": {"type": "xml"}}, "response_format", "text, json_object"),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema", "an object with a schema",
    ),
    "beside a schema": (
        {"response_format": {"type": "json_object", "schema": {}}}, "response_format", "'schema'"
    ),
    "a schema of nothing": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format.json_schema.schema", "Unimplemented keys",
    ),
    "two structures": (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"
    ),
    "a bad expression": ({"guided_regex": "(a"}, "guided_regex", "invalid regex"),
    "surrogates": ({"guided_choice": ["\ud800"]}, "guided_choice", "without lone surrogates"),
    "an empty expression": ({"guided_regex": ""}, "guided_regex", "regex must be a text"),
    "no choices": ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "one"),
    "a schema that is too large": (
        {"guided_json": {"enum": ["x" * 2**17]}}, "guided_json", "65536 characters, got 131086"
    ),
    "a megabyte of schema": (
        {"guided_json": {"description": "x" * 2**20}}, "guided_json", "1048576 characters, got 10"
    ),
    "two grammars": (
        {"guided_regex": "a", "grammar": 'root ::= "a"'}, "grammar", "exclude each other"
    ),
    "a minimum of a grammar": (
        {"guided_regex": "a*", "min_tokens": 2}, "min_tokens", "leave min_tokens out"
    ),
    "no prompt": ({"prompt": None}, "prompt", "missing"),
    "texts and ids": ({"prompt": ["a", [1]]}, "prompt", "a list of either"),
    "an id too large": ({"prompt": [1, 259]}, "prompt", "from 0 to 258"),
    "a lone surrogate": ({"prompt": ["a", "\ud800"]}, "prompt", "valid Unicode", "surrogates"),
    "tokens below 0": ({"max_tokens": -2}, "max_tokens", "from 0 to 2147483647", "got -2"),
    "a large number": ({"temperature": HUGE}, "temperature", "a number from 0 to 2"),
    "no answers": ({"n": 0}, "n", "from 1 to 128"),
    "stops": ({"stop": ["a"] * 5}, "stop", "at most 4"),
    "flag": ({"stream": "yes"}, "stream", "true or false"),
    "options without a stream": ({"stream_options": {}}, "stream_options", "stream=false"),
    "best_of": ({"best_of": 2}, "best_of", "must be 1, got 2"),
    "bias above 100": ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    "301 biases": ({"logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "logit_bias", "300"),
    "min_tokens": ({"min_tokens": 17}, "min_tokens", "at most the 16 new tokens"),
    "stop_token_ids": ({"stop_token_ids": [1, "2"]}, "stop_token_ids", "128 token ids"),
    "service_tier": ({"service_tier": "priority"}, "service_tier", "'auto' or 'default'"),
    "scores of a long prompt": (
        {"prompt": [1] * 13_000, "echo": True, "logprobs": 20}, "logprobs", "262144", "273000"
    ),
    "an empty salt": ({"cache_salt": ""}, "cache_salt", "1 to 1000"),
    "a salt with a lone surrogate": ({"cache_salt": "\ud800"}, "cache_salt", "valid Unicode"),
}  # fmt: skip

CHATS = {
    "a lone surrogate": (
        {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogates"
    ),
    "a lone surrogate in a variable": (
        {"chat_template_kwargs": {"x": ["\ud800"]}}, "chat_template_kwargs", "surrogates"
    ),
    "a user's message to continue": (
        {"continue_final_message": True}, "continue_final_message", "assistant, got user"
    ),
    "no messages": ({"messages": []}, "messages", "1 to 8192 messages"),
    "a role that is a list": (
        {"messages": [{"role": [], "content": ""}]}, "messages[0].role", "one of"
    ),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content", "parts of type text",
    ),
    "a field of a message": (
        {"messages": [{"role": "user", "content": "x", "audio": {"id": "1"}}]}, "messages[0]",
        "nothing else",
    ),
    "top_logprobs alone": ({"top_logprobs": 1}, "top_logprobs", "logprobs=false"),
}  # fmt: skip
CASES = {"completions": COMPLETIONS, "chat": CHATS}


def ask(served, kind: str, **body):
    return served.ask("POST", PATHS[kind], {"seed": 5} | GOOD[kind] | body)


def refused(answer, status, words, kind="invalid_request_error"):
    assert answer.status == status, answer
    error = answer.error
    assert error["type"] == kind
    for word in words:
        assert word in error["message"], error


@pytest.mark.parametrize("case", BODIES)
def test_bodies(served, case):
    body, *words = BODIES[case]
    refused(served.ask("POST", "/v1/completions", body), 400, words)
    served.works()


@pytest.mark.parametrize("kind, case", [(kind, case) for kind in CASES for case in CASES[kind]])
def test_fields(served, kind, case):
    fields, param, *words = CASES[kind][case]
    answer = ask(served, kind, **fields)
    refused(answer, 400, words)
    assert answer.error["param"] == param


def test_an_unknown_model(served):
    answer = served.complete("|x", model="gpt-\ud800")
    assert answer.status == 404
    assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")
    assert "'bytes'" in answer.error["message"]


@pytest.mark.parametrize("method, path, status, remedy", [
    ("GET", "/v1/completion", 404, "did you mean /v1/completions?"),
    ("POST", "/v1/embeddings", 404, "did you mean "),
    ("GET", "/", 404, "there are /v1/completions, "),
    ("PUT", "/v1/chat/completions", 405, "it takes POST"),
    ("DELETE", "/v1/models/bytes", 405, "it takes GET"),
])  # fmt: skip
def test_unknown_routes_and_methods(served, method, path, status, remedy):
    answer = served.ask(method, path, None if method == "GET" else {})
    refused(answer, status, [method, path, remedy])
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_content_types_without_cors_preflight_are_refused(served, kind):
    """A web page may send these types to any site without a preflight request."""
    answer = served.ask("POST", "/v1/completions", GOOD["completions"], content_type=kind)
    refused(answer, 415, ["application/json"])


def test_a_compressed_body(served):
    packed = gzip.compress(json.dumps(GOOD["completions"]).encode())
    answer = served.ask("POST", "/v1/completions", packed, content_encoding="gzip")
    refused(answer, 415, ["not be compressed", "gzip"])


@pytest.mark.parametrize("raw", [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"GET\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * 100_000,
])  # fmt: skip
def test_invalid_http(served, raw):
    """test_framing.py has lengths of bodies."""
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
    monkeypatch.setattr("jaxkv.serve.http.responses.ChoiceReader.read", fail)
    refused(served.complete("|x"), 500, ["the server failed"], "server_error")
    assert "the server failed" in served.complete("|x", stream=True).raw.decode()
    assert caplog.text.count("RuntimeError: a bug") >= 3
    monkeypatch.undo()
    served.works()


def test_exceptions_of_the_client(served):
    with served.client() as client:
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            client.completions.create(model="gpt", prompt="|x")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="bytes", prompt="|x", temperature=3)
        said = [{"role": "user", "content": "x"}]
        with pytest.raises(openai.BadRequestError, match="tools"):
            client.chat.completions.create(
                model="bytes", messages=said, tools=[{"type": "function"}]
            )
        with pytest.raises(openai.InternalServerError, match="64 requests wait"):
            client.completions.create(model="bytes", prompt="!full")
        with (
            client.completions.create(model="bytes", prompt="!fail", stream=True) as stream,
            pytest.raises(openai.APIError, match="the engine failed"),
        ):
            list(stream)


CREATE = {"completions": Completions.create, "chat": ChatCompletions.create}
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


@pytest.mark.parametrize("kind", CREATE)
def test_every_field_of_the_client_is_in_the_table(kind):
    names = inspect.signature(CREATE[kind]).parameters.keys() - OF_THE_CLIENT
    assert names <= FIELDS[kind].keys()


ANY = {bool: (True, False), int: (-1, 0, 7), float: (0.5,), str: ("", "x"), dict: ({}, {"a": "b"}),
       list: ([], ["a"])}  # fmt: skip


@pytest.mark.parametrize("kind", CREATE)
def test_values_that_ask_for_nothing_are_ignored_and_others_are_refused(kind):
    plain = validate(kind, GOOD[kind])
    for names, accepted in (*IGNORED["both"], *IGNORED[kind]):
        values = [None]
        for value in accepted:
            values += ANY[value] if isinstance(value, type) else [value]
        for name in names.split():
            for value in values:
                assert validate(kind, GOOD[kind] | {name: value}) == plain
            for value in (True, 2.5, 3, "else", ["else"], {"else": 1}):
                if value not in values and type(value) not in accepted:
                    with pytest.raises(APIError, match=f"{name} .*; leave it out") as error:
                        validate(kind, GOOD[kind] | {name: value})
                    assert error.value.param == name


# Defaults of llama.cpp that ask for nothing: POST /completion in its tools/server/README.md. Also
# OpenAI's format of text, and null in an unknown field.
DEFAULTS = {
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "n_predict": -1, "n_indent": 0, "n_keep": 0,
    "n_cache_reuse": 0, "stream": False, "stop": [], "typical_p": 1.0, "repeat_last_n": 64,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75,
    "dry_allowed_length": 2, "dry_penalty_last_n": 64, "xtc_probability": 0.0, "xtc_threshold": 0.1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"], "mirostat": 0, "mirostat_tau": 5.0,
    "mirostat_eta": 0.1, "ignore_eos": False, "logit_bias": [], "n_probs": 0, "min_keep": 0,
    "t_max_predict_ms": 0, "id_slot": -1, "cache_prompt": True, "return_tokens": False,
    "timings_per_token": False, "return_progress": False,
    "response_format": {"type": "text"}, "unheard_of": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", CREATE)
def test_defaults_are_accepted(served, kind):
    plain = ask(served, kind).json["choices"]
    for name, value in DEFAULTS.items():
        validate(kind, GOOD[kind] | {name: value})
    assert ask(served, kind, **DEFAULTS).json["choices"] == plain


@pytest.mark.parametrize("kind", CREATE)
@pytest.mark.parametrize("option", STREAM_OPTIONS)
def test_stream_options(served, kind, option):
    asked = {"stream": True, "max_tokens": 20}
    plain = [event["choices"] for event in events(ask(served, kind, **asked).raw)]
    answer = ask(served, kind, stream_options={option: False, "include_usage": None}, **asked)
    assert [event["choices"] for event in events(answer.raw)] == plain
    refused(ask(served, kind, stream_options={option: True}, **asked), 400, [option])


@pytest.mark.parametrize("kind, limit", [
    ("completions", "max_tokens"), ("chat", "max_tokens"), ("chat", "max_completion_tokens"),
])  # fmt: skip
@pytest.mark.parametrize("max_len, max_new_tokens", [(20_000, 20_000), (None, 131_072)])
def test_no_limit_is_that_of_the_server(kind, limit, max_len, max_new_tokens):
    with serving(FakeEngine(max_len=max_len)) as served:
        answer = ask(served, kind, **{limit: -1})
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        (request,) = served.engine.requests
        assert request.max_new_tokens == (
            max_new_tokens if max_len is None else max_new_tokens - len(request.tokens)
        )


def test_two_limits_of_an_answer_must_be_equal(served):
    assert ask(served, "chat", max_tokens=3, max_completion_tokens=3).status == 200
    assert ask(served, "chat", max_tokens=None, max_completion_tokens=3).status == 200
    answer = ask(served, "chat", max_tokens=3, max_completion_tokens=4)
    refused(answer, 400, ["max_tokens must equal max_completion_tokens, got 3 and 4", "leave one"])


def test_an_answer_is_sent_back_with_empty_fields(served):
    empty = {"tool_calls": [], "annotations": [], "refusal": None, "reasoning_content": ""}
    with serving(FakeEngine(), language(TEMPLATE)) as served:
        said = [*TALK, {"role": "assistant", "content": "b"} | empty]
        assert ask(served, "chat", messages=said).status == 200
        said[1]["tool_calls"] = [{"id": "1"}]
        refused(ask(served, "chat", messages=said), 400, ["messages[1]"])


@pytest.mark.parametrize("body, thinking, effort", [
    ({"chat_template_kwargs": {"enable_thinking": False}}, "False", ""),
    ({"reasoning_effort": "none"}, "False", "none"),
    ({"reasoning_effort": "low"}, "True", "low"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "False",
     "low"),
    ({}, "", ""),
])  # fmt: skip
def test_thinking_reaches_a_template_that_reads_it(body, thinking, effort):
    """Elsewhere it asks for nothing, as in transformers and vLLM."""
    chat = {"messages": TALK} | body
    assert chat_prompt(TEMPLATE, **chat) == chat_prompt(TEMPLATE, messages=TALK)
    thought = chat_prompt(TEMPLATE + "{{ enable_thinking }}", **chat)
    assert thought.endswith(f"]{thinking}".encode())
    assert chat_prompt(TEMPLATE + "{{ reasoning_effort }}", **chat).endswith(f"]{effort}".encode())
