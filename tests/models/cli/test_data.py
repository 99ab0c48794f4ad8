"""`jaxkv data`: formats, and wrong input. tests/models/test_corpus.py has the tokens."""

from __future__ import annotations

import gzip
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.models.cli.test_bad_input import refused
from tests.models.training_data import VOCAB, write_texts

LINE = json.dumps({"id": 1, "text": "a text"}).encode() + b"\n"


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
    ("a.jsonl", LINE, "body", ("no field 'body'", "'id', 'text'", "--column")),
    ("a.jsonl", LINE + b'\n{"text": "a\n' + LINE, "text",
     ("line 3: not valid JSON", "Invalid control character", "correct the line, or remove it")),
    ("a.jsonl", LINE, "id", ("line 1: field 'id' must be a string, got int",)),
    ("a.jsonl", LINE + b"[1]\n", "text", ("line 2: must be an object, got list",)),
    ("a.jsonl", b'{"text": "\xe9"}', "text", ("line 1: not UTF-8 (byte 10 of the line)",)),
    ("a.jsonl", b'{"text": "\\ud800"}', "text", ("line 1: a lone surrogate at character 0",)),
    ("a.jsonl", b"[" * 100_000, "text", ("line 1: JSON that is nested too deeply",)),
    ("a.jsonl.gz", COMPRESSED[:-20], "text", ("a.jsonl.gz is not a whole gzip file", "download")),
    ("a.jsonl.gz", LINE, "text", ("a.jsonl.gz is not a whole gzip file",)),
    ("a.jsonl.gz", gzip.compress(LINE * 7 + b"{\n", mtime=0), "text", ("line 8: not valid JSON",)),
    ("a.parquet", parquet(body=["a"], id=[1]), "text",
     ("has no column 'text'", "its columns are 'body', 'id'; name one with --column")),
    ("a.parquet", parquet(text=["a"], id=[1]), "id",
     ("column 'id' of", "must hold strings, got int", "--column")),
    ("a.parquet", parquet(text=["a"])[:-9], "text", ("a.parquet is not a whole Parquet file",)),
    ("a.txt", b"text \xe9", "text", ("a.txt is not UTF-8 (byte 5)",)),
    ("a.csv", b"text\n", "text", ("a.csv must end with .txt, .jsonl", "convert it, or rename it")),
    ("a.gz", b"text\n", "text", ("a.gz must end with",)),
)  # fmt: skip


@pytest.mark.parametrize(("name", "raw", "column", "words"), BAD_TEXTS)
def test_bad_texts(data, tmp_path, name, raw, column, words):
    refused(data("--column", column, **{name.replace(".", "_"): raw}), *words)
    assert not (tmp_path / "out").exists()


def test_bad_arguments(data, run, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    flags = ("--vocab-size", VOCAB, "--out", tmp_path / "out")
    refused(run("data", "--text", tmp_path / "empty", *flags), "empty has no file that ends with",
            ".txt, .jsonl, .jsonl.gz, .parquet", "name files, or another folder")  # fmt: skip
    arguments = ("data", "--text", tmp_path / "valid", *flags, "--valid-share")
    refused(run(*arguments, 1), "--valid-share must be above 0 and below 1", "got 1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in [name for name in sys.modules if name.startswith("pyarrow.")]:
        monkeypatch.delitem(sys.modules, name)
    refused(data(a_parquet=b""), "the package pyarrow is missing; pip install 'jaxkv[train]'")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_not_replaced(run, tmp_path):
    texts = write_texts(tmp_path / "texts")
    command = ("data", "--text", texts, "--valid", texts / "0.txt", "--vocab-size", VOCAB)
    assert run(*command, "--out", tmp_path / "out").code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    refused(run(*command, "--remove", "_", "--out", tmp_path / "out"), "is the folder of another",
            "removed was None and is now '_'", "choose another --out")  # fmt: skip
    refused(run(*command, "--out", texts), "holds other files (0.txt); choose another")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
