"""`jaxkv data` and `jaxkv pretrain`, from texts to a model that generates."""

from __future__ import annotations

import json

import jax
import pytest

from tests.models.cli.test_bad_input import refused
from tests.models.training_data import SMALL, VOCAB, write_texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def folder(run, texts, tmp_path):
    """A data folder that the command created."""
    out = tmp_path / "tokens"
    report = run("data", "--text", texts, "--valid", texts / "5.txt", "--vocab-size", VOCAB,
               "--out", out, "--json").json  # fmt: skip
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    assert report["documents"] == len(manifest["files"]) == 6
    assert (report["vocab"], report["dtype"]) == (VOCAB, "uint16")
    assert report["train_tokens"] > report["valid_tokens"] > 100
    return out


def pretrain(run, folder, out, *settings, preset="tiny", flags=()):
    chosen = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        return run("pretrain", "--preset", preset, "--data", folder, "--out", out, *flags, *chosen)


def test_data_pretrain_and_generate(run, folder, tmp_path):
    out = tmp_path / "run"
    ran = pretrain(run, folder, out, "sink_variant=logit", "steps=6")
    assert (ran.code, ran.out) == (0, f"{out / 'hf'}\n")
    assert "step 6/6" in ran.err and "tokens/s" in ran.err and "min left" in ran.err
    assert "attention on the first token" in ran.err
    again = pretrain(run, folder, out, "sink_variant=logit", "steps=6")
    assert again.code == 0 and "resuming from step 6\nall steps are done" in again.err
    assert json.loads((out / "hf" / "config.json").read_text())["sink_logit"] == "learned"
    flags = ("--max-new-tokens", 40, "--policy", "streaming:sinks=1,window=15", "--json")
    report = run("generate", "the cat", "--model", out / "hf", *flags).json
    assert len(report["tokens"]) == 40 or report["finish_reason"] == "eos"


def test_sinks_in_front_of_a_model(run, model, texts, tmp_path):
    """From its texts to a file of sinks, which `perplexity` puts in front of the model."""
    tokens, out = tmp_path / "tokens", tmp_path / "run"
    data = ("data", "--text", texts, "--valid", texts / "5.txt", "--out", tokens)
    assert run(*data, "--tokenizer", model).code == 0
    recipe = ("context=16", "batch_size=8", "steps=2", "valid_samples=8", "sink_variant=token")
    chosen = [word for setting in recipe for word in ("--set", setting)]
    start = ("pretrain", "--data", tokens, "--out", out, "--from", model)
    with jax.numpy_dtype_promotion("standard"):
        ran = run(*start, "--train", "sinks", *chosen)
        assert (ran.code, ran.out) == (0, f"{out / 'sinks.safetensors'}\n")
        again = run(*start, "--train", "sinks", *chosen)
        assert "all steps are done" in again.err
        refused(run(*start, *chosen), "of another run", "train was 'sinks' and is now 'all'")
    score = (
        "perplexity",
        "--text",
        texts / "5.txt",
        "--max-tokens",
        64,
        "--model",
        model,
        "--json",
    )
    plain, learned, constant = (
        run(*score, *flags).json["loss"]
        for flags in ((), ("--sinks", out / "sinks.safetensors"), ("--sinks", "constant:."))
    )
    assert len({plain, learned, constant}) == 3
    refused(run(*score, "--sinks", tmp_path / "absent"), "cannot read the sinks", "name a sinks")
    refused(run(*score, "--sinks", "constant:two words"), "a constant sink is one token")
    refused(run(*start, "--preset", "tiny"), "not allowed with")
    refused(run("pretrain", "--data", tokens, "--out", out), "--preset", "--from", "required")
    refused(run("pretrain", "--preset", "tiny", "--data", tokens, "--out", out, "--train", "sinks"),
            "train=sinks", "name a model with --from")  # fmt: skip
    refused(run(*start, *chosen, "--train", "attention", "--set", "train=sinks"),
            "got --set train=sinks", "give --train PART")  # fmt: skip


def test_bad_input(run, folder, texts, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def data(*flags):
        return run("data", "--out", out, "--text", *flags)

    refused(data(tmp_path / "nowhere", "--vocab-size", 300), "no such text", "nowhere")
    refused(data(texts), "--vocab-size", "--tokenizer", "required")
    refused(data(texts, "--vocab-size", 100, "--valid", texts / "0.txt"), "at least 259", "100")
    monkeypatch.setattr("jaxkv.models.training.data_tokenizer.train", lambda *_: Wide())
    wide = ("--vocab-size", 300, "--valid", texts / "0.txt")
    refused(data(texts, *wide, "--token-dtype", "uint16"), "65,535", "70,000", "use uint32")
    assert not out.exists()
    (tmp_path / "file").write_text("x")
    refused(run("data", "--text", texts, *wide, "--out", tmp_path / "file"), "can be written to")

    refused(pretrain(run, tmp_path / "nowhere", out), "a folder that `jaxkv data` made")
    refused(pretrain(run, texts, out), "is not a data folder", "jaxkv data")
    refused(pretrain(run, folder, out, preset="large"), "tiny, default, small, 160m", "'large'")
    refused(pretrain(run, folder, out, "sink=token"), "got 'sink'; did you mean 'sink_variant'?")
    refused(pretrain(run, folder, out, "context=4096"), "a batch of 8 samples", "give more text")
    refused(pretrain(run, folder, out, "batch_size=4", flags=("--mesh", "data=8")), "must divide")
    refused(pretrain(run, folder, out, flags=("--mesh", "model=2")), "data", "--mesh data=2")
    refused(pretrain(run, folder, out, flags=("--distributed=x",)), "HOST:PORT,PROCESSES,NUMBER")
    assert not out.exists()


class Wide:
    """A tokenizer with more tokens than fit into 16 bits."""

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return {"a": 69_999}
