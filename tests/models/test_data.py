"""Token shards, and batches that depend only on the seed and the step."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import partial

import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.models.loading.tokenizer import read_tokenizer
from jaxkv.models.training import corpus, data
from tests.models.training_data import VOCAB, write_texts, write_tokens


def test_every_text_is_restored_and_ends_with_its_token(tokens):
    tokenizer = read_tokenizer(tokens.folder)
    texts = sorted((tokens.folder.parent / "texts").glob("*.txt"))
    for split, split_texts in (("train", texts[:-1]), ("valid", texts[-1:])):
        ids = tokens.run(split, 0, tokens.count(split))
        ends = np.flatnonzero(ids == tokens.id_of(data.END))
        assert len(ends) == len(split_texts) and ends[-1] == len(ids) - 1
        begins = [0, *(ends[:-1] + 1)]
        for path, begin, end in zip(split_texts, begins, ends, strict=True):
            assert tokenizer.decode(ids[begin:end]) == path.read_text("utf-8")
    listed = {file["file"]: file["documents"] for file in tokens.manifest["files"]}
    assert listed == {p.name: {"train": 1} for p in texts[:-1]} | {texts[-1].name: {"valid": 1}}


def test_special_tokens_have_their_own_ids(tokens):
    ids = [tokens.id_of(name) for name in data.SPECIAL]
    assert len(set(ids)) == 3 and max(ids) < tokens.vocab == VOCAB
    everything = np.concatenate([tokens.run(s, 0, tokens.count(s)) for s in data.SPLITS])
    assert not np.isin(ids[1:], everything).any()


def test_special_tokens_in_a_text_are_plain_text(tmp_path):
    texts = write_texts(tmp_path / "texts", documents=2)
    text = "a<|sink|>b<|endoftext|>c"
    (texts / "0.txt").write_text(text)
    tokens = corpus.prepare([texts], tmp_path / "out", 259, valid=[texts / "1.txt"])
    ids = tokens.run("train", 0, tokens.count("train"))
    assert np.isin(ids, [tokens.id_of(name) for name in data.SPECIAL]).sum() == 1  # the final end
    assert read_tokenizer(tokens.folder).decode(ids) == text


def test_runs_of_an_epoch_do_not_overlap(tokens, monkeypatch):
    """Each token of an epoch is an input once."""
    length, rows = 16, 1
    runs = (tokens.count("train") - 1) // length - 1
    seen = Counter()
    monkeypatch.setattr(
        data.DataFolder, "run", lambda self, split, start, length: np.arange(start, start + length)
    )
    for step in range(runs):
        seen.update(data.batch(tokens, "train", 5, step, rows, length)[0, :-1].tolist())
    assert set(seen.values()) == {1} and len(seen) == runs * length
    next_epoch = [data.batch(tokens, "train", 5, s + runs, rows, length)[0, 0] for s in range(3)]
    assert next_epoch != [data.batch(tokens, "train", 5, s, rows, length)[0, 0] for s in range(3)]


def test_a_batch_depends_on_seed_and_step_alone(tokens):
    def at(seed, step):
        return data.batch(data.read(tokens.folder), "train", seed, step, 4, 16)

    late = at(0, 1000)
    for step in (3, 999, 2):
        at(0, step)
    np.testing.assert_array_equal(late, at(0, 1000))
    assert (late != at(1, 1000)).any() and (late != at(0, 1001)).any()


def test_shards_are_read_as_one(tmp_path, monkeypatch):
    one_shard = write_tokens(tmp_path / "whole")
    monkeypatch.setattr(corpus, "SHARD", 101)
    cut = write_tokens(tmp_path / "cut")
    assert len(cut.manifest["shards"]["train"]) > 3
    for start, length in ((0, 1), (100, 1), (100, 2), (90, 230), (0, one_shard.count("train"))):
        np.testing.assert_array_equal(
            one_shard.run("train", start, length), cut.run("train", start, length)
        )


def test_only_the_folder_of_the_same_run_is_written_to(tmp_path):
    texts = write_texts(tmp_path / "texts", documents=3)
    make = partial(corpus.prepare, [texts], vocab=VOCAB, share=0.4)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "deep" / "train-00000.npy").mkdir(parents=True)
    out = tmp_path / "out"
    first = make(out=out).manifest
    shutil.copytree(out, tmp_path / "without_run")
    (tmp_path / "without_run" / "run.json").unlink()
    (tmp_path / "without_run" / "lock").unlink()
    for folder, named in (
        ("texts", "0.txt"), ("model", "config"), ("deep", "train"), ("without_run", "manifest")
    ):  # fmt: skip
        before = contents(tmp_path / folder)
        with pytest.raises(UserError, match=rf"holds other files \({named}.*choose another"):
            make(out=tmp_path / folder)
        assert contents(tmp_path / folder) == before
    before, times = contents(out), {p: p.stat().st_mtime_ns for p in out.iterdir()}
    assert make(out=out).manifest == first  # the same command again
    for changes, words in (
        ({"share": 0.5}, "valid_share was 0.4 and is now 0.5"),
        ({"remove": "_"}, "removed was None and is now '_'"),
        ({"column": "body"}, "column was 'text' and is now 'body'"),
        ({"vocab": VOCAB - 1}, f"tokenizer was {VOCAB} and is now {VOCAB - 1}"),
        ({"dtype": "uint32"}, "dtype was 'auto' and is now 'uint32'"),
    ):
        with pytest.raises(UserError, match=f"of another run: {words}; .*choose another --out"):
            make(**{"out": out} | changes)
    (texts / "0.txt").write_text("changed")
    with pytest.raises(UserError, match=r"of another run: texts was '3 file\(s\), sha256"):
        make(out=out)
    assert contents(out) == before
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == times


def contents(folder):
    return {p.name: p.read_bytes() if p.is_file() else None for p in folder.iterdir()}


def test_validation_documents_are_chosen_by_content(tmp_path):
    texts = write_texts(tmp_path / "texts", documents=30)
    held = corpus.prepare([texts], tmp_path / "one", VOCAB, share=0.2)
    again = corpus.prepare(sorted(texts.glob("*.txt"))[::-1], tmp_path / "two", VOCAB, share=0.2)

    def valid(tokens):
        return {f["file"] for f in tokens.manifest["files"] if "valid" in f["documents"]}

    assert valid(held) == valid(again) and 0 < len(valid(held)) < 20


def test_an_existing_tokenizer_is_used(tmp_path, tokens):
    taken = corpus.prepare(
        [tokens.folder.parent / "texts"], tmp_path / "out",
        tokenizer=tokens.folder / "tokenizer.json", share=0.4,
    )  # fmt: skip
    assert taken.vocab == tokens.vocab and taken.manifest["special"] == tokens.manifest["special"]


MARKS = r"_|([^\w\s] ?)\1{3,}"  # emphasis, and lines of one repeated sign


def test_the_removed_pattern_is_in_no_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A _word_ alone.\n____\nNo more. . . . .\n" * 20, "utf-8")
    held = write_texts(tmp_path / "held")
    tokens = corpus.prepare([text], tmp_path / "out", 270, valid=[held], remove=MARKS)
    ids = tokens.run("train", 0, tokens.count("train"))
    assert read_tokenizer(tokens.folder).decode(ids[:-1]) == "A word alone.\n\nNo more.\n" * 20
    assert tokens.manifest["removed"] == MARKS
    with pytest.raises(UserError, match=r"must be a regular expression, got '\('.*; correct it"):
        corpus.prepare([text], tmp_path / "out", 270, valid=[held], remove="(")


def test_16_bits_where_they_suffice(tmp_path, tokens):
    assert tokens.manifest["dtype"] == "uint16"
    wide = write_tokens(tmp_path, dtype="uint32")
    assert wide.manifest["dtype"] == "uint32"
    np.testing.assert_array_equal(wide.run("train", 5, 50), tokens.run("train", 5, 50))
    # Raised before the tokenizer is trained: training on so little text fails with another error.
    with pytest.raises(UserError, match=r"uint16 holds ids up to 65,535, .* 65,537.*uint32"):
        write_tokens(tmp_path, vocab=65_537, dtype="uint16")


def change(name, edit):
    def apply(folder):
        path = folder / name
        path.write_bytes(edit(path.read_bytes()))

    return apply


DAMAGE = {
    "shard cut short": (change("train-00000.npy", lambda raw: raw[:-10]), "train-00000.npy"),
    "shard of another run": (
        change("valid-00000.npy", lambda raw: raw[:-2] + b"\0\1"), "valid-00000.npy must be",
    ),
    "foreign tokenizer": (change("tokenizer.json", lambda raw: raw + b" "), "tokenizer.json must"),
    "no shard": (lambda folder: (folder / "train-00000.npy").unlink(), "is missing or another"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "is not a data folder"),
    "edited manifest": (
        change("manifest.json", lambda raw: raw.replace(b'"vocab": 300', b'"vocab": 301')),
        "manifest.json was changed after `jaxkv data` wrote it; delete the folder and create it",
    ),
    "half a manifest": (
        change("manifest.json", lambda raw: raw[:-10]),
        "not valid JSON: .*; delete the folder and create it again",
    ),
    "another's manifest": (
        lambda folder: (folder / "manifest.json").write_text(json.dumps({"shards": {}})),
        "is not a data folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_refused(tmp_path, damage):
    folder = write_tokens(tmp_path).folder
    damage_folder, message = DAMAGE[damage]
    damage_folder(folder)
    with pytest.raises(UserError, match=message):
        data.read(folder)


def test_unusable_texts_are_refused(tmp_path, tokens):
    texts = write_texts(tmp_path / "texts")
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))

    def refused(message, *args, **how):
        with pytest.raises(UserError, match=message):
            corpus.prepare(*args, **how)
        assert not (tmp_path / "out" / "manifest.json").exists()

    out = tmp_path / "out"
    refused("no such text", [tmp_path / "nowhere"], out, VOCAB)
    refused("has no file that ends with .txt", [tmp_path / "empty"], out, VOCAB)
    refused(r"not UTF-8 \(byte 3\)", [tmp_path / "latin.txt"], out, VOCAB, valid=[texts])
    refused("valid split has no document", [texts], out, VOCAB, share=1e-9)
    refused("at least 259 tokens, got 100", [texts], out, 100, valid=[texts / "0.txt"])
    refused(
        "choose a smaller vocabulary, or give more text",
        [texts],
        out,
        5000,
        valid=[texts / "0.txt"],
    )
    valid = [texts / "0.txt"]
    refused("is not a tokenizer.json", [texts], out, tokenizer=tmp_path / "latin.txt", valid=valid)
    with pytest.raises(UserError, match=r"batch of 8 samples of 4096 tokens needs .*train has"):
        data.batch(tokens, "train", 0, 0, 8, 4096)
