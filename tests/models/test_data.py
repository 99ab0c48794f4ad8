"""Token shards, and batches that depend only on the seed and the step."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial

import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.models.training import corpus, data
from tests.models.training_data import VOCAB, write_texts, write_tokens


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


def test_only_the_folder_of_the_same_run_is_written_to(tmp_path):
    texts = write_texts(tmp_path / "texts", documents=3)
    make = partial(corpus.prepare, [texts], vocab=VOCAB, valid_share=0.4)
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
        ({"valid_share": 0.5}, "valid_share was 0.4 and is now 0.5"),
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
    "foreign tokenizer": (change("tokenizer.json", lambda raw: raw + b" "), "tokenizer.json must"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "is not a data folder"),
    "edited manifest": (
        change("manifest.json", lambda raw: raw.replace(b'"vocab": 300', b'"vocab": 301')),
        "manifest.json was changed after `jaxkv data` wrote it; delete the folder and create it",
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
    texts, out = write_texts(tmp_path / "texts"), tmp_path / "out"
    text = texts / "0.txt"
    for how, message in (
        ({"vocab": VOCAB, "valid_share": 1e-9}, "the valid split has none; give more texts"),
        ({"vocab": 5000, "valid": [text]}, "choose a smaller vocabulary, or give more text"),
        ({"vocab": None, "tokenizer": text, "valid": [text]}, "is not a tokenizer.json"),
        ({"vocab": VOCAB, "remove": "("}, r"must be a regular expression, got '\('.*; correct it"),
    ):
        with pytest.raises(UserError, match=message):
            corpus.prepare([texts], out, **how)
        assert not (out / "manifest.json").exists()
    with pytest.raises(UserError, match=r"batch of 8 samples of 4096 tokens needs .*train has"):
        data.batch(tokens, "train", 0, 0, 8, 4096)
