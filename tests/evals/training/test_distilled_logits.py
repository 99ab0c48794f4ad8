"""Sink logits distilled from a small model whose heads lean on their first token."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.training import distilled_logits, sinks_in_front
from tests.tiny import write_tiny

pytestmark = pytest.mark.usefixtures("optax_promotes_dtypes")
WINDOW = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("distilled") / "model")


@pytest.fixture
def batches():
    return np.random.default_rng(0).integers(3, 200, (30, 2, 24)).astype(np.int32)


def test_the_divergence_falls(folder, batches):
    llm = models.load(folder, "float32")
    same = np.repeat(batches[:1], len(batches), axis=0)
    logits, losses, _ = distilled_logits.distil(llm.config, llm.weights, same, WINDOW, lr=0.1)
    assert logits.shape == (llm.config.layers, llm.config.heads)
    assert losses[-1] < 0.98 * losses[0]


def test_a_window_of_all_tokens_asks_for_no_sink(folder, batches):
    """The student is then the teacher but for its logits, which fall."""
    llm = models.load(folder, "float32")
    found = distilled_logits.distil(llm.config, llm.weights, batches, 23, lr=0.5)
    assert found[0].mean() < -1


def test_the_file_is_read_as_sinks(folder, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat and saw the dog. " * 40)
    words = f"x --model {folder} --texts {text} --window 8 --context 24 --steps 4 --out"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(tmp_path / "out")])
    distilled_logits.main()
    llm = models.load(folder, "float32", sinks=tmp_path / "out" / sinks_in_front.FILE)
    assert llm.config.sink_logit == "learned"
    about = sinks_in_front.described(tmp_path / "out")
    assert about["steps"] == 4 == len(about["divergence"]) and about["file_bytes"] > 100


def test_a_window_as_long_as_a_sample_is_refused(folder, tmp_path, monkeypatch, capsys):
    words = f"x --model {folder} --texts {tmp_path / 'none'} --window 24 --context 24 --out x"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit):
        distilled_logits.main()
    assert "--context must be longer than --window 24, got 24" in capsys.readouterr().err
