"""Scoring by lm-eval's `local-completions`: the requests that it sends, and lm-eval itself."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from models.tokenizer import LETTERS
from tests.server.fake import BOS, EOS, logprob

# Context, and what may follow it.
QUESTIONS = [
    ("The sky is", [" blue", " of no interest", " ✓"]),
    ("Two and two", [" make four", " is"]),
    ("Once", [" upon a time", " ", " more"]),
]


def expected(context: str, choice: str) -> float:
    ids = [*context.encode(), *choice.encode()]
    pairs = list(pairwise(ids))[-len(choice.encode()) :]
    return sum(logprob(*pair) for pair in pairs)


def scored_as(prompt: list[int], choice: dict, context: int) -> tuple[float, bool]:
    """What a client takes from an answer that echoes its prompt and has one token more."""
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(prompt) + 1
    assert logprobs["token_logprobs"][0] is None
    values = logprobs["token_logprobs"][context:-1]
    tops = logprobs["top_logprobs"][context:-1]
    for name, value, top in zip(logprobs["tokens"][context:-1], values, tops, strict=True):
        assert top[name] == value
    return sum(values), all(v == max(top.values()) for v, top in zip(values, tops, strict=True))


@pytest.mark.parametrize("again", [False, True])
def test_the_requests_it_sends(served, again):
    """Also where the prompts are cached by now."""
    pairs = [(context, choice) for context, choices in QUESTIONS for choice in choices]
    prompts = [[*context.encode(), *choice.encode()] for context, choice in pairs]
    body = {"model": "bytes", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    answer = served.ask("POST", "/v1/completions", body | {"seed": 1234, "echo": True})
    choices = sorted(answer.json["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(prompts)
    for (context, end), prompt, choice in zip(pairs, prompts, choices, strict=True):
        value, greedy = scored_as(prompt, choice, len(context.encode()))
        assert value == expected(context, end)
        assert greedy == (value == -len(end.encode()))


def test_an_eos_is_an_entry_too(served):
    """The one new token may be an eos: without its entry the last of the prompt would be missed."""
    choice = served.complete(
        [*b"x|"], max_tokens=1, echo=True, logprobs=1, temperature=0
    ).json["choices"][0]  # fmt: skip
    assert choice["logprobs"]["tokens"] == ["x", "|", "</s>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """The tokenizer of the fake language, as its clients load it."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {letter: byte for letter, byte in LETTERS.items()} | {"<s>": BOS, "</s>": EOS}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.filterwarnings("ignore")  # its own, and those of what it imports
def test_lm_eval(served, tokenizer, monkeypatch):
    pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets
    from lm_eval import simple_evaluate

    docs = [{"context": context, "choices": choices, "best": 0} for context, choices in QUESTIONS]
    task = {
        "task": "tiny",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(docs)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "best",
        "target_delimiter": "",
    }
    told = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "bytes",
            "base_url": f"http://127.0.0.1:{served.port}/v1/completions",
            "tokenizer": str(tokenizer),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
            "max_retries": 1,
        },
        tasks=[task],
        batch_size=2,
        bootstrap_iters=0,
    )
    samples = told["samples"]["tiny"]
    right = 0
    for sample, (context, choices) in zip(samples, QUESTIONS, strict=True):
        values = [expected(context, choice) for choice in choices]
        assert [value for ((value, _),) in sample["resps"]] == values
        right += values[0] == max(values)
    assert told["results"]["tiny"]["acc,none"] == right / len(QUESTIONS)
