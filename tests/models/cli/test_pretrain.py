"""`jaxkv data` and `jaxkv pretrain`: from texts to a model that generates; bad texts."""

from __future__ import annotations

import gzip
import json
import re
import sys

import jax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxkv.models.training.recipes import PRESETS
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
    fields = {setting.partition("=")[0]: setting for setting in (*SMALL, *settings)}
    chosen = [word for setting in fields.values() for word in ("--set", setting)]
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        return run("pretrain", "--preset", preset, "--data", folder, "--out", out, *flags, *chosen)


def test_the_help_names_every_preset(run):
    words = " ".join(run("pretrain", "--help").out.split())
    assert not [name for name in PRESETS if not re.search(rf"recipe: [^(]*\b{name}\b", words)]


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


def test_bad_input(run, folder, texts, tmp_path):
    out = tmp_path / "out"

    def data(*flags):
        return run("data", "--out", out, "--text", *flags)

    refused(data(texts), "--vocab-size", "--tokenizer", "required")
    refused(data(texts, "--vocab-size", 100, "--valid", texts / "0.txt"), "at least 259", "100")
    refused(pretrain(run, texts, out), "is not a data folder", "jaxkv data")
    refused(pretrain(run, folder, out, preset="large"), "tiny, default, small, 160m", "'large'")
    refused(pretrain(run, folder, out, "context=4096"), "a batch of 8 samples", "give more text")
    refused(pretrain(run, folder, out, flags=("--mesh", "model=2")), "data", "--mesh data=2")
    refused(pretrain(run, folder, out, flags=("--distributed=x",)), "HOST:PORT,PROCESSES,NUMBER")
    assert not out.exists()


LINE = json.dumps({"id": 1, "text": "a text"}).encode() + b"\n"


def test_the_last_setting_of_a_field_counts(run, tmp_path):
    words = ("pretrain", "--preset", "tiny", "--data", tmp_path / "absent", "--out", tmp_path)
    steps = ("--set", "steps=2", "--set", "steps=2")
    refused(run(*words, *steps, "--set", "lr=x"), "lr must be a number", "got 'x'")
    refused(run(*words, *steps, "--set", "lr=x", "--set", "lr=1"), "data must be a folder")


@pytest.fixture
def data(run, tmp_path):
    """Call `jaxkv data` with files of these contents."""
    valid = write_texts(tmp_path / "valid", documents=1)

    def data(*flags, **files):
        for name, raw in files.items():
            (tmp_path / name.replace("_", ".")).write_bytes(raw)
        paths = [tmp_path / name.replace("_", ".") for name in files]
        flags = ("--vocab-size", VOCAB, "--valid", valid, *flags)
        return run("data", "--out", tmp_path / "out", "--text", *paths, *flags)

    return data


def parquet(**columns) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def test_formats_and_column(run, tmp_path):
    texts = write_texts(tmp_path / "texts", documents=8)
    words = [path.read_text("utf-8") for path in sorted(texts.iterdir())]
    for path in list(texts.iterdir())[4:]:
        path.unlink()
    lines = b"".join(json.dumps({"body": word}).encode() + b"\n" for word in words)
    (texts / "a.jsonl").write_bytes(lines)
    (texts / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (texts / "c.parquet").write_bytes(parquet(body=words, id=range(8)))
    flags = ("--vocab-size", VOCAB, "--column", "body", "--valid-share", 0.3, "--json")
    command = ("data", "--text", texts, "--out", tmp_path / "out", *flags)
    report = run(*command).json
    assert run(*command).json == report  # complete already
    assert report["documents"] == 4 + 3 * 8
    assert min(report["train_tokens"], report["valid_tokens"]) > 0


COMPRESSED = gzip.compress(LINE * 1000, mtime=0)
BAD_TEXTS = (  # a name, its contents, --column, and what the refusal says
    ("a.jsonl", LINE * 2 + b'{"id": 1}\n', "text",
     ("a.jsonl, line 3: no field 'text', its fields are 'id'", "--column")),
    ("a.jsonl", LINE + b'\n{"text": "a\n' + LINE, "text",
     ("line 3: not valid JSON", "Invalid control character", "correct the line, or remove it")),
    ("a.jsonl", LINE, "id", ("line 1: field 'id' must be a string, got int",)),
    ("a.jsonl", LINE + b"[1]\n", "text", ("line 2: must be an object, got list",)),
    ("a.jsonl", b'{"text": "\xe9"}', "text", ("line 1: not valid JSON", "position 10")),
    ("a.jsonl", b'{"text": "\\ud800"}', "text", ("line 1: a lone surrogate at character 0",)),
    ("a.jsonl.gz", COMPRESSED[:-20], "text", ("a.jsonl.gz is not a whole gzip file", "download")),
    ("a.jsonl.gz", gzip.compress(LINE * 7 + b"{\n", mtime=0), "text", ("line 8: not valid JSON",)),
    ("a.parquet", parquet(body=["a"], id=[1]), "text",
     ("has no column 'text'", "its columns are 'body', 'id'; name one with --column")),
    ("a.parquet", parquet(text=["a"], id=[1]), "id",
     ("column 'id' of", "must hold strings, got int", "--column")),
    ("a.parquet", parquet(text=["a"])[:-9], "text", ("a.parquet is not a whole Parquet file",)),
    ("a.txt", b"text \xe9", None, ("a.txt is not UTF-8 (byte 5)",)),
    ("a.csv", b"text\n", "text", ("a.csv must end with .txt, .jsonl", "convert it, or rename it")),
)  # fmt: skip


@pytest.mark.parametrize(("name", "raw", "column", "words"), BAD_TEXTS)
def test_bad_texts(data, tmp_path, name, raw, column, words):
    column = () if column is None else ("--column", column)
    refused(data(*column, **{name.replace(".", "_"): raw}), *words)
    assert not (tmp_path / "out").exists()


def test_bad_arguments(data, run, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    flags = ("--vocab-size", VOCAB, "--out", tmp_path / "out")
    refused(run("data", "--text", tmp_path / "empty", *flags), "empty has no file that ends with",
            ".txt, .jsonl, .jsonl.gz, .parquet", "name files, or another folder")  # fmt: skip
    arguments = ("data", "--text", tmp_path / "valid", *flags, "--valid-share")
    refused(run(*arguments, 1), "--valid-share must be above 0 and below 1", "got 1")
    share = ("--valid-share", 0.1)
    refused(data(*share, a_txt=b"text"), "--valid names", "got --valid-share 0.1 too", "leave one")
    twice = run(*arguments[:-1], "--valid", tmp_path / "valid" / "0.txt")
    refused(twice, "--text must name a file that --valid does not", "0.txt for both")
    column = data("--column", "body", a_txt=b"text")
    refused(column, "--column names a field", "'body'", "leave it out")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in [name for name in sys.modules if name.startswith("pyarrow.")]:
        monkeypatch.delitem(sys.modules, name)
    refused(data(a_parquet=b""), "the package pyarrow is missing; pip install 'jaxkv[train]'")
    assert not (tmp_path / "out").exists()
