"""`jaxkv data`: formats, and wrong input. tests/models/test_corpus.py has the tokens."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time

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
    reports = []
    for processes in (1, 2):
        command = ("data", "--text", texts, "--out", tmp_path / str(processes), *flags)
        reports.append(run(*command, "--processes", processes).json)
        assert run(*command, "--processes", 3 - processes).json == reports[-1]  # complete already
    assert reports[0] == reports[1]
    assert reports[0]["documents"] == 4 + 3 * 8
    assert min(reports[0]["train_tokens"], reports[0]["valid_tokens"]) > 0


def test_bad_json_lines(data, tmp_path):
    refused(data(a_jsonl=LINE * 2 + b'{"id": 1}\n'),
            "a.jsonl, line 3: no field 'text', its fields are 'id'", "--column")  # fmt: skip
    refused(data("--column", "body", a_jsonl=LINE), "no field 'body'", "'id', 'text'", "--column")
    refused(data(a_jsonl=LINE + b'\n{"text": "a\n' + LINE), "a.jsonl, line 3: not valid JSON",
            "Invalid control character", "correct the line, or remove it")  # fmt: skip
    refused(data("--column", "id", a_jsonl=LINE), "line 1: field 'id' must be a string, got int")
    refused(data(a_jsonl=LINE + b"[1]\n"), "line 2: must be an object, got list")
    refused(data(a_jsonl=b'{"text": "\xe9"}'), "line 1: not UTF-8 (byte 10 of the line)")
    refused(data(a_jsonl=b'{"text": "\\ud800"}'), "line 1: a lone surrogate at character 0")
    refused(data(a_jsonl=b"[" * 100_000), "line 1: JSON that is nested too deeply")
    compressed = gzip.compress(LINE * 1000)
    refused(data(a_jsonl_gz=compressed[:-20]), "a.jsonl.gz is not a whole gzip file", "download it")
    refused(data(a_jsonl_gz=LINE), "a.jsonl.gz is not a whole gzip file")
    broken = gzip.compress(LINE * 7 + b"{\n")
    refused(data(a_jsonl_gz=broken), "a.jsonl.gz, line 8: not valid JSON")
    assert not (tmp_path / "out").exists()


def test_bad_parquet(data, tmp_path, monkeypatch):
    refused(data(a_parquet=parquet(body=["a"], id=[1])), "a.parquet has no column 'text'",
            "its columns are 'body', 'id'; name one with --column")  # fmt: skip
    refused(data("--column", "id", a_parquet=parquet(text=["a"], id=[1])),
            "column 'id' of", "must hold strings, got int64", "--column")  # fmt: skip
    refused(data(a_parquet=parquet(text=["a"])[:-9]), "a.parquet is not a whole Parquet file")
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in [name for name in sys.modules if name.startswith("pyarrow.")]:
        monkeypatch.delitem(sys.modules, name)
    refused(data(a_parquet=b""), "the package pyarrow is missing; pip install 'jaxkv[train]'")


def test_bad_texts(data, run, tmp_path):
    (tmp_path / "empty").mkdir()
    flags = ("--vocab-size", VOCAB, "--out", tmp_path / "out")
    refused(run("data", "--text", tmp_path / "empty", *flags), "empty has no file that ends with",
            ".txt, .jsonl, .jsonl.gz, .parquet", "name files, or another folder")  # fmt: skip
    refused(data(a_csv=b"text\n"), "a.csv must end with .txt, .jsonl", "convert it, or rename it")
    refused(data(a_gz=b"text\n"), "a.gz must end with")
    arguments = ("data", "--text", tmp_path / "valid", *flags, "--valid-share")
    for share in (0, 1, -0.5, 2):
        refused(run(*arguments, share), "--valid-share must be above 0 and below 1", f"got {share}")
    refused(data("--processes", 0, a_txt=b"text"), "--processes", "at least 1", "'0'")
    refused(data(a_txt=b"text \xe9"), "a.txt is not UTF-8 (byte 5)")
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


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals a group of processes")
def test_ctrl_c_ends_every_process(tmp_path):
    """With exit code 130 and no word of a process."""
    texts = tmp_path / "texts"
    write_texts(texts, documents=2)
    flags = ["--vocab-size", VOCAB, "--valid", texts / "0.txt", "--processes", "2"]
    (texts / "a.jsonl").write_bytes((LINE[:-3] + b" it was long ago" * 1000 + b'"}\n') * 600)
    command = [sys.executable, "-m", "jaxkv", "data", "--text", texts, "--out", tmp_path / "out"]
    process = subprocess.Popen(
        [str(word) for word in command + flags], stderr=subprocess.PIPE, start_new_session=True
    )
    while not list(tmp_path.glob("out/parts/.*.train.*")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130
    # A process that was left would still have this pipe open.
    with process.stderr:
        assert b"Traceback" not in process.stderr.read()
