"""The model that comes with the package."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.lib.record import read
from jaxkv.evals.training import default_model
from jaxkv.models.llm import DEFAULT
from jaxkv.models.pretrain import pretrain
from jaxkv.models.recipes import PRESETS
from jaxkv.models.run_metadata import sha256
from tests.models.training_data import small, write_texts

MOST = 10_000_000  # bytes of its weights


def test_it_is_what_the_record_says():
    record = read("default_model")
    weights = DEFAULT / "model.safetensors"
    assert record["data"]["models/default/model.safetensors"] == sha256(weights)
    assert weights.stat().st_size <= MOST
    recipe = record["results"]["training"]["recipe"]
    preset = dataclasses.asdict(PRESETS["default"])
    assert {k: preset[k] for k in recipe} == recipe


def test_its_card_is_in_step():
    card = (DEFAULT / default_model.CARD).read_text("utf-8")
    assert card == default_model.card(read("default_model"))


def test_it_writes_words_with_a_sink_token_in_front():
    llm = models.load()
    assert llm.folder == DEFAULT and len(llm.tokenizer.front) == 1
    assert llm.config.context >= 512
    answer = models.generate(llm, "Once upon a time", max_new_tokens=1500, temperature=0.9,
                             ignore_eos=True)  # fmt: skip
    words = default_model.words(answer.text)
    common = {"the", "and", "of", "to", "a", "in", "he", "she", "was", "that", "it", "his", "her"}
    share = np.mean([word in common for word in words])
    assert 0.15 < share < 0.5  # of English prose a quarter to a third
    assert (
        json.loads((DEFAULT / "config.json").read_text("utf-8"))["bos_token_id"]
        == (llm.tokenizer.front[0])
    )


def test_measures_of_a_text():
    found = default_model.measures("A cat sat. A cat sat; a cat-zzz 12", {"a", "cat", "sat"})
    assert found == {"letters": 34, "words": 9, "known": 8 / 9, "anew": 4 / 6}


@pytest.fixture
def made(tokens, tmp_path, monkeypatch):
    """The folder that `evals.training.default_model` writes for four steps and two texts."""
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        pretrain(
            small("sinks=token", "context=256", "rows=1", "steps=4"),
            tokens,
            tmp_path / "run",
            tell=len,
        )
    write_texts(tmp_path / "texts", documents=2, words=900)
    monkeypatch.setattr(default_model, "TRIALS", tmp_path / "out")
    monkeypatch.setattr("jaxkv.evals.lib.record.TRIALS", tmp_path / "out")

    def make(**other):
        flags = {"run": "run", "texts": "texts", "data": tokens.folder} | other
        words = [word for f, v in flags.items() for word in (f"--{f}", str(tmp_path / v))]
        words += ["--tokens", "800", "--block", "200", "--quick"]
        monkeypatch.setattr(sys, "argv", ["default_model", *words])
        default_model.main()
        return tmp_path / "out"

    return make


@pytest.mark.slow
def test_a_run_becomes_a_model_with_its_card(made, tokens):
    out = made()
    record = read("default_model", out)
    results = record["results"]
    assert results["training"]["data"] == tokens.digest
    assert results["training"]["tokens"] == 4 * 256
    assert results["reading"]["tokens"] == results["writing"]["tokens"] == 800
    assert len(results["bars"]) == 4
    for text in results["writing"]["0.9"]:
        assert len(text["blocks"]) == 4
    weights = out / "default" / "model.safetensors"
    assert record["data"]["models/default/model.safetensors"] == sha256(weights)
    assert (out / "default" / "README.md").read_text("utf-8") == default_model.card(record)
    llm = models.load(out / "default")
    assert llm.config.dtype == "bfloat16" and llm.tokenizer.front == (tokens.id_of("<|sink|>"),)


@pytest.mark.slow
def test_nothing_is_stored_of_another_run(made, tmp_path):
    (tmp_path / "one").mkdir()
    for other in ({"data": "texts"}, {"texts": "one"}):
        with pytest.raises((SystemExit, UserError)):
            made(**other)
    assert not (tmp_path / "out").exists()
