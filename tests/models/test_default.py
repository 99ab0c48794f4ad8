"""The model that comes with the package."""

import json

import numpy as np

import models
from evals import default_model
from evals.record import read, sha256
from models.llm import DEFAULT
from models.recipes import PRESETS, read_recipe

MOST = 10_000_000  # bytes of its weights


def test_it_is_what_the_record_says():
    record = read("default_model")
    weights = DEFAULT / "model.safetensors"
    assert record["data"]["models/default/model.safetensors"] == sha256(weights)
    assert weights.stat().st_size <= MOST
    recipe = record["results"]["training"]["recipe"]
    assert recipe == {k: v for k, v in vars(PRESETS["default"]).items() if k in recipe}
    assert set(vars(read_recipe("default"))) - set(recipe) == {
        "log_every", "look_every", "save_every", "valid_samples",
    }  # fmt: skip


def test_its_card_is_in_step():
    card = (DEFAULT / default_model.CARD).read_text("utf-8")
    assert card == default_model.card(read("default_model"))


def test_it_writes_words_with_a_sink_token_in_front():
    llm = models.load()
    assert llm.folder == DEFAULT and len(llm.tokenizer.front) == 1
    assert llm.config.context >= 512
    answer = models.generate(llm, "Once upon a time", max_new_tokens=1500, temperature=0.8,
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
    assert found == {"words": 9, "known": 8 / 9, "anew": 4 / 6}
