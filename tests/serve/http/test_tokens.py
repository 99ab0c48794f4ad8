"""The routes that turn text into token ids and back."""

from __future__ import annotations

import pytest

from tests.serve.http.conftest import serving
from tests.serve.http.fake import BOS, TEMPLATE, FakeEngine, language


@pytest.fixture(scope="module")
def served():
    with serving(FakeEngine(), language(TEMPLATE)) as served:
        yield served


def ask(served, path, **body):
    return served.ask("POST", path, {"model": "bytes"} | body)


def test_texts_and_messages_have_the_tokens_of_an_answer(served):
    answer = ask(served, "/tokenize", prompt="hé").json
    assert answer["tokens"] == [BOS, *"hé".encode()]
    assert answer["count"] == 4
    messages = [{"role": "user", "content": "hi"}]
    answer = ask(served, "/tokenize", messages=messages).json
    assert answer["tokens"] == [BOS, *b"[user]hi[assistant]"]
    assert not served.engine.requests


def test_texts_longer_than_the_server_allows_are_counted(served):
    """A client counts them to shorten them."""
    room = served.engine.max_len
    answer = ask(served, "/tokenize", prompt="a" * room, messages=None).json
    assert (answer["count"], answer["max_model_len"]) == (room + 1, room)
    assert ask(served, "/tokenize", prompt=[1] * (room + 1)).json["count"] == room + 1


def test_tokens_have_a_text(served):
    tokens = [BOS, *"hé".encode()]
    assert ask(served, "/detokenize", tokens=tokens).json == {"prompt": "<s>hé"}
    assert ask(served, "/detokenize", tokens=[]).json == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"prompt": [10**6]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "nothing": 1}, "nothing"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "n": 2}, "n"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": [{"role": "king", "content": ""}]}, "messages[0].role"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [1], "x": 1}, "x"),
    ],
)
def test_bad_bodies_are_refused_by_name(served, path, body, param):
    answer = ask(served, path, **body)
    assert answer.status == 400
    assert answer.error["param"] == param
