"""Data folders of text, JSON lines and Parquet: equal to a plain loop, for any number of processes.

The plain loop is in this file: each document is encoded whole and followed by the end token.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Coder
from tokenizers import decoders, pre_tokenizers

from jaxkv.errors import UserError
from jaxkv.models.training import corpus, data, data_tokenizer, text_files
from tests.models.training_data import VOCAB

PART, SHARD, SHARE = 3_000, 1_000, 0.3
LETTERS = ("a", "é", "漢", "7", " ", " ", ".", "_", "\n", "\n\n", "\r\n", "'s", "😀", "<|sink|>")
posix = pytest.mark.skipif(os.name != "posix", reason="kills a group of processes")


def document(rng: random.Random, size: int = 300) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randrange(size)))


def jsonl(texts) -> bytes:
    return b"".join(json.dumps({"n": 1, "text": text}).encode() + b"\n" for text in texts)


def write_corpus(folder: Path) -> list[str | Path]:
    """Write files of every kind. Returns their documents in order, those of .txt as paths."""
    rng = random.Random(0)
    (folder / "b" / "c").mkdir(parents=True)
    (folder / "a.txt").write_bytes(document(rng, 20_000).encode())
    (folder / "b" / "mark.txt").write_bytes(b"\xef\xbb\xbf" + b"begins with a mark\r\nand")
    (folder / "empty.txt").touch()
    lines = [document(rng) for _ in range(60)]
    raw = jsonl(lines[:20]) + b"\n  \n" + jsonl([None]) + jsonl(lines[20:])
    (folder / "b" / "c.jsonl").write_bytes(raw.removesuffix(b"\n"))
    zipped = [document(rng) for _ in range(20)]
    (folder / "b" / "c" / "d.jsonl.gz").write_bytes(gzip.compress(jsonl(zipped)))
    rows = [document(rng) for _ in range(200)]
    table = pa.table({"id": range(201), "text": [*rows[:50], None, *rows[50:]]})
    pq.write_table(table, folder / "z.parquet", row_group_size=70)
    paths = [folder / "a.txt", folder / "b" / "mark.txt", folder / "empty.txt"]
    return [paths[0], *zipped, *lines, paths[1], paths[2], *rows]


def plain_loop(documents, encode, end: int) -> dict[str, list[int]]:
    """The tokens of each split: every document whole, then the end token."""
    tokens = {"train": [], "valid": []}
    for document in documents:
        raw = document.read_bytes() if isinstance(document, Path) else document.encode()
        share = int.from_bytes(hashlib.sha256(raw).digest()[:8], "big") / 2**64
        text = raw.decode("utf-8-sig") if isinstance(document, Path) else document
        tokens["valid" if share < SHARE else "train"] += [*encode(text), end]
    return tokens


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Many parts and shards. Processes of their own read in large blocks: no token may differ."""
    monkeypatch.setattr(text_files, "PART", PART)
    monkeypatch.setattr(text_files, "BLOCK", 100)
    monkeypatch.setattr(corpus, "SHARD", SHARD)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    return folder, write_corpus(folder)


def prepare(texts, out, **how):
    return corpus.prepare([texts[0]], out, **{"vocab": VOCAB, "share": SHARE} | how)


def tokens_of(tokens) -> dict[str, list[int]]:
    return {s: tokens.run(s, 0, tokens.count(s)).tolist() for s in data.SPLITS}


def test_tokens_equal_those_of_a_plain_loop(texts, tmp_path):
    tokens = prepare(texts, tmp_path / "out")
    coder = Coder.from_file(str(tokens.folder / "tokenizer.json"))
    coder.encode_special_tokens = True
    expected = plain_loop(texts[1], lambda t: coder.encode(t).ids, tokens.id_of(data.END))
    assert tokens_of(tokens) == expected
    assert sum(map(tokens.documents, data.SPLITS)) == len(texts[1])
    assert len(tokens.manifest["shards"]["train"]) > 2
    names = [file["file"] for file in tokens.manifest["files"]]
    assert names == [
        "a.txt", "b/c/d.jsonl.gz", "b/c.jsonl", "b/mark.txt", "empty.txt", "z.parquet",
    ]  # fmt: skip
    assert data.read(tokens.folder) == tokens


def test_any_number_of_processes_gives_the_same_bytes(texts, tmp_path, capfd):
    one_process, two, three = (
        contents(prepare(texts, tmp_path / str(n), processes=n).folder) for n in (1, 2, 3)
    )
    assert one_process == two == three
    assert set(one_process) > {"manifest.json", "run.json", "tokenizer.json", "train-00001.npy"}
    assert "Traceback" not in capfd.readouterr().err  # of a process that ends


KILLED = """
import os, pathlib, signal, sys
from jaxkv.models import corpus, text_files
text_files.PART, corpus.SHARD = {part}, {shard}
def report(phase, done, total):
    if phase == sys.argv[3] and total / 2 < done < total:
        os.killpg(0, signal.SIGKILL)
if __name__ == "__main__":
    corpus.prepare([pathlib.Path(sys.argv[1])], pathlib.Path(sys.argv[2]), {vocab},
                   share={share}, processes=2, progress=report)
"""


@pytest.mark.slow
@posix
@pytest.mark.parametrize("phase", ["tokenizing", "writing the shards"])
def test_a_killed_run_continues_with_the_same_bytes(texts, tmp_path, phase):
    """SIGKILL of the run and its processes, in the middle of a phase."""
    expected = contents(prepare(texts, tmp_path / "whole").folder)
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(KILLED.format(part=PART, shard=SHARD, vocab=VOCAB, share=SHARE))
    run = [sys.executable, script, texts[0], out, phase]
    done = subprocess.run(run, start_new_session=True, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(UserError, match="is not a data folder"):
        data.read(out)
    complete = len(list((out / "parts").glob("*.json")))
    assert complete > 5
    (out / "parts" / ".00003.train.abcd").write_bytes(b"half")  # as a write that was cut short
    seen = []
    prepare(texts, out, progress=lambda *at: seen.append(at))
    begin = next(at for at in seen if at[0] == "tokenizing")
    assert begin[1] > begin[2] / 2  # the complete parts are not tokenized again
    assert contents(out) == expected


def test_a_part_without_its_counts_is_not_complete(texts, tmp_path, monkeypatch):
    """Tokens that were written before the counts are written again."""
    expected = contents(prepare(texts, tmp_path / "whole").folder)

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(corpus, "_join", fail)
        prepare(texts, tmp_path / "out")
    (tmp_path / "out" / "parts" / "00004.json").unlink()
    (tmp_path / "out" / "parts" / "00004.train").write_bytes(b"half")
    assert contents(prepare(texts, tmp_path / "out").folder) == expected


@posix
def test_a_process_that_is_killed_ends_the_run(texts, tmp_path):
    def report(phase, done, total):
        if phase == "tokenizing" and 0 < done < total:
            for process in multiprocessing.active_children():
                process.kill()

    with pytest.raises(UserError, match=r"was ended, .*fewer --processes; .*resumes the run"):
        prepare(texts, tmp_path / "out", processes=2, progress=report)
    assert not multiprocessing.active_children()
    prepare(texts, tmp_path / "out")


def test_an_error_in_a_process_is_that_of_the_text(texts, tmp_path):
    (tmp_path / "texts").mkdir()
    lines = jsonl(["some text"] * 1000)
    (tmp_path / "texts" / "a.jsonl").write_bytes(lines + b'{"text": \n' + lines)
    tokenizer = prepare(texts, tmp_path / "out").folder / "tokenizer.json"
    for processes in (1, 2):
        with pytest.raises(UserError, match=r"a\.jsonl, line 1001: not valid JSON .*remove it"):
            corpus.prepare(
                [tmp_path / "texts"], tmp_path / str(processes),
                tokenizer=tokenizer, processes=processes,
            )  # fmt: skip


def metaspace(coder):
    """A tokenizer that puts a space in front of a text."""
    coder.pre_tokenizer = pre_tokenizers.Metaspace()
    coder.decoder = decoders.Metaspace()


def prefix_space(coder):
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


@pytest.mark.parametrize("change", [metaspace, prefix_space, lambda coder: None])
def test_a_text_is_cut_only_where_no_token_changes(texts, tmp_path, change):
    coder = Coder.from_file(str(prepare(texts, tmp_path / "first").folder / "tokenizer.json"))
    change(coder)
    coder.save(str(tmp_path / "changed.json"))
    assert data_tokenizer.can_cut(coder) == (change not in (metaspace, prefix_space))
    tokens = prepare(texts, tmp_path / "out", vocab=None, tokenizer=tmp_path / "changed.json")
    coder.encode_special_tokens = True
    expected = plain_loop(texts[1], lambda t: coder.encode(t).ids, tokens.id_of(data.END))
    assert tokens_of(tokens) == expected


def test_a_pattern_sees_the_whole_text(tmp_path):
    """Also one that matches across line ends, where other texts are cut."""
    (tmp_path / "texts").mkdir()
    text = "first line\nsecond line\n" * 400
    (tmp_path / "texts" / "a.txt").write_text(text)
    (tmp_path / "texts" / "b.jsonl").write_bytes(jsonl([text] * 3))
    tokens = corpus.prepare(
        [tmp_path / "texts"], tmp_path / "out", 261, remove=r"(?s)\n.*\nsecond",
        valid=[tmp_path / "texts" / "a.txt"],
    )  # fmt: skip
    coder = Coder.from_file(str(tokens.folder / "tokenizer.json"))
    for split in data.SPLITS:
        decoded = coder.decode(tokens.run(split, 0, tokens.count(split)).tolist())
        assert decoded == "first line line\n" * tokens.documents(split)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_a_text_add_up_to_it(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    text = document(rng, 2_000)
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr(text_files, "PART", rng.choice([1, 7, 100, 5_000]))
    monkeypatch.setattr(text_files, "BLOCK", rng.choice([1, 7, 100, 5_000]))
    monkeypatch.setattr(text_files, "_WINDOW", rng.choice([8, 50, 1_000]))
    reading = text_files.ReadSettings("text", None, 0.5, True)
    file = text_files.TextFile(path, "a", "text", path.stat().st_size, "", "train")
    parts = text_files.divide([file], reading)
    sections = [t for part in parts for section in part for t in text_files.read(section, reading)]
    pieces = [t.text for t in sections if t.text]
    assert "".join(pieces) == text
    assert [t.last for t in sections] == [False] * (len(sections) - 1) + [True]
    for before, after in itertools.pairwise(pieces):
        assert before[-1].isalnum() and after[0] in "\r\n"


def test_a_long_text_is_read_in_blocks(tmp_path, monkeypatch):
    """So a file may be larger than the memory."""
    path, max_read, read = tmp_path / "a.txt", [0], text_files._bytes
    path.write_text("a line of text\n" * 20_000)
    monkeypatch.setattr(text_files, "_WINDOW", 64)

    def bytes_of(path, start, stop):
        max_read[0] = max(max_read[0], stop - start)
        return read(path, start, stop)

    monkeypatch.setattr(text_files, "_bytes", bytes_of)
    (tmp_path / "b.txt").write_text("held back")
    corpus.prepare([path], tmp_path / "out", 265, valid=[tmp_path / "b.txt"])
    assert 0 < max_read[0] < 2 * 100


def test_the_order_of_files_is_that_of_their_names(tmp_path):
    """Neither the order of creation nor the place of the folder matters."""
    manifests = []
    for place, order in (("x", "321"), ("y/z", "213")):
        folder = tmp_path / place / "texts"
        folder.mkdir(parents=True)
        for name in order:
            (folder / f"{name}.txt").write_text(f"text number {name} of three " * 20)
        manifests.append(
            contents(corpus.prepare([folder], tmp_path / place / "out", 262, share=0.5).folder)
        )
    assert manifests[0] == manifests[1]


def test_other_files_of_a_folder_are_named(texts, tmp_path):
    for name in ("a.txt", "b.txt", "c.csv", ".hidden"):
        (tmp_path / name).write_text(f"text {name}")
    with pytest.warns(UserWarning, match=r"not read: c\.csv in .*, without the ending \.txt"):
        assert list(text_files.files_in([tmp_path]).values()) == ["a.txt", "b.txt"]
