"""The default model, which the package contains."""

import dataclasses
import json
import re

import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import read
from jaxkv.evals.training.sink_tables import recipe_of_record
from jaxkv.models.loading.llm import DEFAULT
from jaxkv.models.tools.run_metadata import sha256
from jaxkv.models.training.recipes import PRESETS

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


def test_the_default_model_has_a_sink_token_and_writes_english():
    llm = models.load()
    assert llm.path == DEFAULT and len(llm.tokenizer.front) == 1
    assert llm.config.context >= 512
    answer = models.generate(llm, "Once upon a time", max_new_tokens=1500, temperature=0.9,
                             ignore_eos=True)  # fmt: skip
    words = re.findall(r"[^\W\d_]+", answer.text.lower())
    common = {"the", "and", "of", "to", "a", "in", "he", "she", "was", "that", "it", "his", "her"}
    share = np.mean([word in common for word in words])
    assert 0.15 < share < 0.5  # 1/4 to 1/3 in English prose
    assert (
        json.loads((DEFAULT / "config.json").read_text("utf-8"))["bos_token_id"]
        == (llm.tokenizer.front[0])
    )
