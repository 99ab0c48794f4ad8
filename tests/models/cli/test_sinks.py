"""`jaxkv sinks`, `jaxkv models`, and the layers of a model in `jaxkv policies`."""

import json

import numpy as np

from jaxkv import models
from jaxkv.models.loading.families import FAMILIES
from jaxkv.models.tools import sinks
from jaxkv.models.tools.families import FAMILY_ROWS
from tests.models.cli.test_bad_input import refused
from tests.models.folders import FAMILIES as CONFIGS
from tests.models.folders import OTHERS
from tests.tiny import write_tiny


def test_it_measures_the_loss_of_every_count(run, model, text, tmp_path):
    words = ("sinks", "--model", model, "--text", text, "--capacity", 40)
    ran = run(*words, "--out", tmp_path / "out")
    lines = ran.out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["4", "2", "1", "0"]
    assert "tiny needs " in ran.out and "The first token gets " in ran.out
    report = json.loads((tmp_path / "out" / "sinks.json").read_text())
    assert (tmp_path / "out" / "sinks.png").stat().st_size > 5000
    assert [row["policy"] for row in report["rows"]] == [
        f"streaming:sinks={n},window={40 - n}" for n in (4, 2, 1, 0)
    ]
    llm = models.load(model)
    ids = llm.tokenizer.encode(text.read_text())
    for row in report["rows"]:
        score = models.score(llm, ids, row["policy"], prompt=40)
        np.testing.assert_allclose(row["loss"], np.mean(score.losses), rtol=1e-5)
    assert len(report["first_token_by_layer"]) == llm.config.layers
    assert run(*words, "--json").json["needed"] == report["needed"]


def test_sinks_are_measured_in_layers_without_a_window(run, text, tmp_path):
    ids = {"vocab_size": 258, "bos_token_id": 0, "eos_token_id": 1}
    gemma = OTHERS["gemma3"]
    mixed = write_tiny(tmp_path / "gemma", config=gemma, num_hidden_layers=6, **ids)
    words = ("--text", text, "--capacity", 40)
    ran = run("sinks", "--model", mixed, *words)
    assert "The other 4 layers keep their own window." in ran.out
    windowed = write_tiny(tmp_path / "mistral", config=CONFIGS["mistral"], **ids)
    ran = run("sinks", "--model", windowed, *words)
    refused(ran, "all layers of the model have a window", "the shortest of 24", "--capacity 24")


def row(count, mean, error):
    return {"sinks": count, "over_first": {"mean": mean, "two_errors": error, "count": 9}}


def test_the_fewest_sinks_that_are_close_are_needed():
    most = row(4, 0.0, None)
    cases = (
        ([row(2, 0.0, 0.1), row(1, 0.5, 0.1), row(0, 2.0, 0.1)], 2),
        ([row(2, 0.01, 0.001), row(1, 0.01, 0.001), row(0, 2.0, 0.1)], 1),
        ([row(2, 0.5, 0.1), row(1, 0.5, 0.1), row(0, 2.0, 0.1)], 4),
        ([row(2, 0.5, 0.1), row(1, 0.5, 0.1), row(0, -0.3, 0.1)], 0),
        ([row(2, 0.5, 0.1)], None),
    )
    for rows, expected in cases:
        assert sinks.needed([most, *rows]) == expected


def test_bad_input_of_sinks(run, model, text):
    words = ("sinks", "--model", model, "--text", text)
    refused(run(*words), "at least two caches, 512 tokens", "smaller --capacity")
    refused(run(*words, "--capacity", 4), "at least 5, got '4'")


def test_models_lists_every_family(run):
    rows = run("models", "--json").json["families"]
    assert {row["name"] for row in rows} == {*FAMILIES, "llama", "mistral", "qwen2", "qwen3"}
    assert all(row["architectures"] for row in rows)
    out = run("models").out
    for family in FAMILY_ROWS:
        assert family.name in out and family.models in out


def test_policies_shows_the_layers_of_a_model(run, tmp_path):
    ids = {"vocab_size": 258, "bos_token_id": 0, "eos_token_id": 1}
    folder = write_tiny(tmp_path / "gemma", config=OTHERS["gemma3"], num_hidden_layers=6, **ids)
    policy = "full:max=512"
    shown = run("policies", policy, "--model", folder, "--tokens", 200, "--json").json
    assert [row["layers"] for row in shown["layers"]] == [[0, 1, 3, 4], [2, 5]]
    assert [row["window"] for row in shown["layers"]] == [24, None]
    assert shown["layers"][0]["policy"] == "window:window=24,storage=float"
    assert shown["bytes"] == sum(row["bytes"] for row in shown["layers"])
    llm = models.load(folder)
    stream_bytes = models.Stream(llm, policy, tokens=200).state_bytes
    assert shown["bytes"] == stream_bytes
    text = run("policies", policy, "--model", folder).out
    assert "0-1,3-4" in text and "one sequence of 512 tokens in float32" in text


def test_bad_input_of_layers(run, model):
    refused(run("policies", "--tokens", 5), "--tokens", "give --model")
    refused(run("policies", "--dtype", "float32"), "--dtype", "give --model")
    refused(run("policies", "no", "--model", model), "no")
