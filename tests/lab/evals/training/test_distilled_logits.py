"""Sink logits distilled from a small random model."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.training import distilled_logits, sinks_in_front
from jaxkv.models.network import uncached
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
    repeated = np.repeat(batches[:1], len(batches), axis=0)
    logits, losses, _ = distilled_logits.distil(llm.config, llm.weights, repeated, WINDOW, lr=0.1)
    assert logits.shape == (llm.config.layers, llm.config.heads)
    assert losses[-1] < 0.98 * losses[0]


def test_the_divergence_is_that_of_tokens_beyond_the_window(folder, batches):
    """Against numpy, from the logits of both models."""
    llm = models.load(folder, "float32")
    ids, sinks = batches[0], np.full((llm.config.layers, llm.config.heads), 0.7, np.float32)
    named = {f"layers.{i}.sink_logits": row for i, row in enumerate(sinks)}
    windows = (WINDOW,) * llm.config.layers
    windowed = dataclasses.replace(llm.config, windows=windows, sink_logit="learned")

    def logprobs(config, weights):
        decoder, hidden, _ = uncached.forward(config, weights, ids)
        logits = np.asarray(decoder.logits(hidden), np.float64)[:, WINDOW:]
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    p, q = logprobs(llm.config, llm.weights), logprobs(windowed, llm.weights | named)
    expected = (np.exp(p) * (p - q)).sum(axis=-1).mean()
    divergence = distilled_logits._divergence(sinks, llm.config, WINDOW, llm.weights, ids)
    assert expected > 1e-6 and float(divergence) == pytest.approx(expected, rel=1e-3)


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
