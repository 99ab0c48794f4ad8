"""The default model, which the package contains."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.run import run
from jaxkv.evals.training import default_model
from jaxkv.evals.training.sink_tables import recipe_of_record
from jaxkv.models.loading.llm import DEFAULT
from jaxkv.models.tools.run_metadata import sha256
from jaxkv.models.training.pretrain import pretrain
from jaxkv.models.training.recipes import PRESETS
from tests.models.training_data import small, write_texts

MAX_BYTES = 10_000_000


def test_the_default_model_matches_its_record():
    record = read("default_model")
    weights = DEFAULT / "model.safetensors"
    assert record["data"]["models/default/model.safetensors"] == sha256(weights)
    assert weights.stat().st_size <= MAX_BYTES
    recipe = recipe_of_record(record["results"]["training"]["recipe"])
    preset = dataclasses.asdict(PRESETS["default"])
    assert {k: preset[k] for k in recipe} == recipe


def test_the_calibrated_budgets_in_the_package_are_those_of_this_model():
    policies = models.load().policies("retrieval:budgets=calibrated,calibration=default")
    assert len({policy.layer_budgets for policy in policies}) > 1


def test_the_model_card_matches_the_record():
    card = (DEFAULT / default_model.CARD).read_text("utf-8")
    assert card == default_model.card(read("default_model"))


def test_the_default_model_has_a_sink_token_and_writes_english():
    llm = models.load()
    assert llm.path == DEFAULT and len(llm.tokenizer.front) == 1
    assert llm.config.context >= 512
    answer = models.generate(llm, "Once upon a time", max_new_tokens=1500, temperature=0.9,
                             ignore_eos=True)  # fmt: skip
    words = default_model.words(answer.text)
    common = {"the", "and", "of", "to", "a", "in", "he", "she", "was", "that", "it", "his", "her"}
    share = np.mean([word in common for word in words])
    assert 0.15 < share < 0.5  # 1/4 to 1/3 in English prose
    assert (
        json.loads((DEFAULT / "config.json").read_text("utf-8"))["bos_token_id"]
        == (llm.tokenizer.front[0])
    )


@pytest.fixture
def make_model(tokens, tmp_path, monkeypatch):
    """A function that runs `evals.training.default_model` on a run of four steps and two texts."""
    with jax.numpy_dtype_promotion("standard"):  # optax promotes dtypes
        pretrain(
            small("sink_variant=token", "context=256", "batch_size=1", "steps=4"),
            tokens,
            tmp_path / "run",
            tell=len,
        )
    write_texts(tmp_path / "texts", documents=2, words=900)
    monkeypatch.setattr(default_model, "TRIALS", tmp_path / "out")
    monkeypatch.setattr("jaxkv.evals.lib.record.TRIALS", tmp_path / "out")

    def make(**changes):
        flags = {"run": "run", "texts": "texts", "data": tokens.folder} | changes
        words = [word for f, v in flags.items() for word in (f"--{f}", str(tmp_path / v))]
        words += ["--tokens", "800", "--block", "200", "--quick"]
        run(default_model.MEASURE, words)
        return tmp_path / "out"

    return make


@pytest.mark.slow
def test_a_training_run_becomes_a_model_with_a_card(make_model, tokens):
    out = make_model()
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
