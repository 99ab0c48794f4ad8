"""`jaxkv calibrate`, and policies whose budgets follow its file."""

import json

import pytest

from tests.models.cli.test_bad_input import refused
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def heads(model, tmp_path_factory):
    """The head shares of the model."""
    from jaxkv.cli import main

    out = tmp_path_factory.mktemp("heads") / "heads.json"
    assert main(["calibrate", "--model", model, "--max-tokens", "60", "--out", str(out)]) == 0
    return out


def test_it_writes_or_prints_a_small_file(run, model, text, heads, tmp_path):
    words = ("calibrate", "--model", model, "--max-tokens", "60")
    about = run(*words).out
    assert about == heads.read_text() and len(about) < 2000
    out = tmp_path / "other.json"
    ran = run(*words, "--text", text, "--out", out)
    assert ran.out.startswith(
        f"wrote {out}; use it as retrieval:budgets=calibrated,calibration={out}\n"
    )
    assert json.loads(out.read_text())["text"]["tokens"] == 60
    assert json.loads(out.read_text())["shares"] != json.loads(about)["shares"]
    ran = run(*words, "--text", text, "--out", out, "--json")
    assert ran.json == json.loads(out.read_text())


def test_a_policy_uses_it(run, model, heads, text, tmp_path):
    policy = f"retrieval:capacity=24,sinks=2,window=4,budgets=calibrated,calibration={heads}"
    words = ("--model", model, "--text", text, "--prompt-tokens", 100, "--max-tokens", 120)
    ran = run("perplexity", *words, "--policy", policy, "--json")
    assert ran.json["policy_string"].startswith(policy.rpartition(",start")[0])
    equal = policy.replace("budgets=calibrated", "budgets=equal").partition(",calibration")[0]
    other = run("perplexity", *words, "--policy", equal, "--json")
    assert ran.json["loss"] != other.json["loss"]
    other_model = write_tiny(tmp_path / "other", seed=1)
    ran = run("generate", "Hi", "--model", other_model, "--policy", policy)
    refused(ran, "its weights differ", "jaxkv calibrate")


def test_wrong_texts(run, model, text, tmp_path):
    words = ("calibrate", "--model", model)
    refused(run(*words, "--text", tmp_path / "no.txt"), "no such text")
    refused(run(*words, "--max-tokens", 400), "trained context of 512 tokens", "give at most 23")
    refused(run(*words, "--max-tokens", 31), "--max-tokens", "at least 32")
    refused(run(*words, "--out", tmp_path / "no" / "heads.json"), "--out needs a folder that")
    for name in ("a,b.json", "heads "):
        refused(run(*words, "--out", tmp_path / name), "without comma, ; or =", "rename it")
    refused(run(*words, "--out", "none"), "and other than none, got 'none'", "rename it")
    small = write_tiny(tmp_path / "small", max_position_embeddings=96)
    refused(run("calibrate", "--model", small), "at least 32 tokens, which", "or another model")
    refused(run(*words, "--out", "default"), "head shares in the package", "write default.json")
    (short := tmp_path / "short.txt").write_text("\n\n\n")
    refused(run(*words, "--text", short), "a text of at least 32 tokens, got", "give a longer")
