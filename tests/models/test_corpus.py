"""Data folders of text, JSON lines and Parquet: equal to a plain loop, also after an interrupt.

The plain loop is in this file: each document is encoded whole and followed by the end token.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Coder
from tokenizers import decoders, pre_tokenizers

from jaxkv.errors import UserError
from jaxkv.models.training import corpus, data, text_files
from tests.models.training_data import VOCAB

SHARD, SHARE = 1_000, 0.3
LETTERS = ("a", "é", "漢", "7", " ", " ", ".", "_", "\n", "\n\n", "\r\n", "'s", "😀", "<|sink|>")


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
def small_blocks(monkeypatch):
    """Many blocks, batches and shards."""
    monkeypatch.setattr(text_files, "BLOCK", 100)
    monkeypatch.setattr(corpus, "BATCH", 500)
    monkeypatch.setattr(corpus, "SHARD", SHARD)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    return folder, write_corpus(folder)


def prepare(texts, out, **how):
    return corpus.prepare([texts[0]], out, **{"vocab": VOCAB, "valid_share": SHARE} | how)


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


def test_an_interrupted_run_begins_again_with_the_same_bytes(texts, tmp_path):
    expected = contents(prepare(texts, tmp_path / "whole").folder)

    def interrupt(phase, done, total):
        if phase == "tokenizing" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(texts, tmp_path / "out", progress=interrupt)
    assert (tmp_path / "out" / "train-00000.npy").exists()
    with pytest.raises(UserError, match="is not a data folder"):
        data.read(tmp_path / "out")
    assert contents(prepare(texts, tmp_path / "out").folder) == expected


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
    assert corpus.can_cut(coder) == (change not in (metaspace, prefix_space))
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
def test_pieces_of_a_text_add_up_to_it(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    text = document(rng, 2_000)
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr(text_files, "BLOCK", rng.choice([1, 7, 100, 5_000]))
    settings = text_files.ReadSettings("text", None, 0.5, True)
    file = text_files.TextFile(path, "a", "text", path.stat().st_size, "", "train")
    read = list(text_files.read(file, settings))
    assert "".join(t.text for t in read) == text
    assert [t.last for t in read] == [False] * (len(read) - 1) + [True]
    assert [t.bytes_read for t in read] == sorted(t.bytes_read for t in read)
    assert read[-1].bytes_read == file.bytes
    for before, after in itertools.pairwise(t.text for t in read):
        assert before[-1].isalnum() and after[0] in "\r\n"


def test_other_files_of_a_folder_are_named(texts, tmp_path):
    for name in ("a.txt", "b.txt", "c.csv", ".hidden"):
        (tmp_path / name).write_text(f"text {name}")
    with pytest.warns(UserWarning, match=r"not read: c\.csv in .*, without the ending \.txt"):
        assert list(text_files.files_in([tmp_path]).values()) == ["a.txt", "b.txt"]


def test_a_long_text_is_read_in_blocks(tmp_path):
    """So a file may be larger than the memory."""
    path = tmp_path / "a.txt"
    path.write_text("a line of text\n" * 2_000)
    settings = text_files.ReadSettings("text", None, 0.5, True)
    file = text_files.TextFile(path, "a", "text", path.stat().st_size, "", "train")
    assert max(len(t.text) for t in text_files.read(file, settings)) < 2 * 100
