"""`jaxkv compact`: a document as a file that other commands take as --sinks."""

from __future__ import annotations

import signal

import pytest

from jaxkv.models import compaction
from tests.cli.test_bad_input import refused
from tests.tiny import write_tiny

pytestmark = pytest.mark.usefixtures("optax_promotes_dtypes")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A random model whose context has room for a document and the training texts."""
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    return str(write_tiny(folder, max_position_embeddings=512))


def compact(run, model, text, out, *flags):
    few = ("--slots", 4, "--steps", 2)
    return run("compact", "--text", text, "--out", out, "--model", model, *few, *flags)


@pytest.mark.slow
def test_compact_and_generate(run, model, text, tmp_path):
    out = tmp_path / "new" / "memory.safetensors"
    out.parent.mkdir()
    report = compact(run, model, text, out, "--json").json
    assert (report["slots"], report["steps"], report["memory"]) == (4, 2, str(out))
    assert report["bytes"] == out.stat().st_size
    assert [file.name for file in out.parent.iterdir()] == [out.name]
    flags = ("--model", model, "--policy", "streaming:sinks=4,window=60", "--json")
    plain, learned = (
        run("generate", "Item 3", *flags, "--max-new-tokens", 8, *sinks).json
        for sinks in ((), ("--sinks", out))
    )
    assert plain["tokens"] != learned["tokens"]
    assert plain["prompt_tokens"] == learned["prompt_tokens"]
    score = ("perplexity", "--text", text, *flags)
    assert run(*score).json["loss"] != run(*score, "--sinks", out).json["loss"]
    again = compact(run, model, text, out)
    assert again.code == 0 and "4 slots" in again.out
    refused(run("serve", "--model", model, "--sinks", out), "learned keys and values from a file")


def test_bad_input(run, model, text, tmp_path):
    out = tmp_path / "memory.safetensors"
    cases = {
        ("--slots", 0): ("--slots", "at least 2", "'0'"),
        ("--slots", 211): ("more tokens than slots", "got 211 and 211", "a longer text"),
        ("--steps", 0): ("--steps", "at least 1", "'0'"),
        ("--weights", "int8"): ("float weights", "leave out --weights"),
        ("--out", text): ("ends in .safetensors", "text.txt"),
        ("--out", tmp_path / "no" / "m.safetensors"): ("a folder that exists", "no; create it"),
        ("--text", tmp_path / "none.txt"): ("no such text",),
    }
    for flags, words in cases.items():
        refused(compact(run, model, text, out, *flags), *words)
    assert not out.exists()


def test_memory_of_another_model(run, model, text, tmp_path):
    out = tmp_path / "memory.safetensors"
    assert compact(run, model, text, out).code == 0
    other = write_tiny(tmp_path / "other", seed=1, max_position_embeddings=512)
    flags = ("--model", other, "--sinks", out)
    refused(run("generate", "Hi", *flags), "belong to another model")


def test_ctrl_c_writes_nothing(run, model, text, tmp_path, monkeypatch):
    """An existing file stays as it was."""
    out = tmp_path / "memory.safetensors"
    out.write_bytes(b"as before")
    real = compaction.update

    def update(*given):
        signal.raise_signal(signal.SIGINT)
        return real(*given)

    monkeypatch.setattr(compaction, "update", update)
    ran = compact(run, model, text, out, "--steps", 50)
    assert (ran.code, ran.out) == (130, "")
    *_, line = ran.err.splitlines()  # others show progress
    assert "interrupted after 1 of 50 steps: no file is written" in line
    assert out.read_bytes() == b"as before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["memory.safetensors", "text.txt"]
