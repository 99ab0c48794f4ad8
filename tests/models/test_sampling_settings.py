"""The default sampling of a model: what it publishes, or temperature 0.8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.text import sampling_for
from jaxkv.models.loading.gguf.header import Header
from jaxkv.models.loading.sampling_settings import read_sampling, sampling_of_gguf
from jaxkv.sampling import Sampling
from tests.tiny import write_tiny

QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
POLICY = "streaming:sinks=1,window=15"


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (None, Sampling(0.8)),
        ({"bos_token_id": 1, "temperature": None}, Sampling(0.8)),
        (QWEN, Sampling(0.7, 20, 0.8, 0.0, 1.1)),
        ({"top_p": 0.9}, Sampling(0.8, top_p=0.9)),
        ({"do_sample": False, "temperature": 0.7}, Sampling(0.0)),
        ({"top_k": -1}, Sampling(0.8)),
        ({"top_k": 50.0}, Sampling(0.8, 50)),
    ],
)
def test_generation_config(published, expected, tmp_path):
    if published is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(published))
    assert read_sampling(tmp_path) == expected


def test_the_header_of_a_gguf_file():
    fields = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.name": "x"}
    assert sampling_of_gguf(Header(Path("x.gguf"), fields, {})) == Sampling(0.6, 20)
    assert sampling_of_gguf(Header(Path("x.gguf"), {}, {})) == Sampling(0.8)
    other_types = {"general.sampling.temp": 1, "general.sampling.top_k": 20.0}
    assert sampling_of_gguf(Header(Path("x.gguf"), other_types, {})) == Sampling(1.0, 20)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x" * 5000, "sampling.temp must be of type float, got 'x{59}; download"),
        (float("nan"), r"sampling.temp must be finite, got nan; download"),
        (-1.0, "temperature must be"),
    ],
)
def test_a_wrong_value_in_a_header_is_named(value, message):
    header = Header(Path("x.gguf"), {"general.sampling.temp": value}, {})
    with pytest.raises(UserError, match=rf"^x.gguf.*{message}"):
        sampling_of_gguf(header)


def test_a_wrong_value_names_the_file(tmp_path, unchecked):
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(UserError, match=r"generation_config.json: temperature must be a number"):
        read_sampling(tmp_path)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("sampled") / "tiny", num_hidden_layers=1)
    (folder / "generation_config.json").write_text('{"temperature": 3.0, "top_k": 200}')
    return models.load(folder)


def test_an_answer_is_sampled_as_published(llm):
    assert llm.sampling == Sampling(3.0, 200)
    settings = {"sampling": Sampling(3.0, 200)}, {"top_k": 200}, {}
    tokens = [models.generate(llm, "Hi", POLICY, 20, **arguments).tokens for arguments in settings]
    greedy = models.generate(llm, "Hi", POLICY, 20, temperature=0).tokens
    assert tokens[0] == tokens[1] == tokens[2] != greedy
    assert greedy == models.generate(llm, "Hi", POLICY, 20, sampling=Sampling()).tokens


def test_keywords_replace_single_settings(llm):
    assert sampling_for(llm, None, {"top_k": 5}) == Sampling(3.0, 5)
    assert sampling_for(llm, Sampling(), {}) == Sampling()


def test_a_conversation_is_sampled_as_published(llm):
    answers = [
        "".join(models.Conversation(llm, POLICY).say("Hi", sampling, 20))
        for sampling in (None, llm.sampling, Sampling())
    ]
    assert answers[0] == answers[1] != answers[2]
