"""Sinks in front of one model: which losses are compared, and with what."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.lib.record import read
from jaxkv.evals.training import sinks_in_front
from jaxkv.evals.training.sink_tables import read_losses
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("model") / "model"), sinks="constant:x")


def test_a_stretch_has_the_losses_of_its_own_tokens(llm):
    """The same number whatever is in front; below capacity they are those of full attention."""
    ids = llm.tokenizer.encode("the cat sat on a mat", bos=False)
    losses = read_losses(llm, ids, 1, 64)
    assert len(losses) == len(ids) - 1
    full_losses = np.concatenate(list(models.losses(llm, [*llm.tokenizer.front, *ids], "full")))
    assert len(llm.tokenizer.front) == 2
    np.testing.assert_allclose(losses, full_losses[-len(losses) :], atol=1e-5)


def test_stretches_begin_at_different_tokens(llm, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz")
    stretches = sinks_in_front.cut(llm, [text], 3, 10)
    assert [llm.tokenizer.decode(ids) for ids in stretches.values()] == [
        "abcdefghij", "ijklmnopqr", "qrstuvwxyz"
    ]  # fmt: skip
    with pytest.raises(UserError, match="has 26 tokens, a stretch 27: give --tokens"):
        sinks_in_front.cut(llm, [text], 3, 27)


@pytest.mark.real_model
def test_the_losses_on_a_gpu_are_those_of_this_machine(smollm2, shared):
    """The record was made on an H100: one stretch, a constant sink over four published ones."""
    name = "Kipling_Kim_1901"
    stretches = sinks_in_front.cut(smollm2, [shared / f"text/books/valid/{name}.txt"], 2, 2_048)
    ids, constant = stretches[f"{name} 0"], models.load("smollm2-135m", "float32", sinks="constant")
    four_sinks, one_sink = (
        read_losses(llm, ids, sinks, 256).mean() for llm, sinks in ((smollm2, 4), (constant, 1))
    )
    recorded = read("sinks_in_front")["results"]["variants"]["constant"]["1+255"]
    assert one_sink - four_sinks == pytest.approx(
        recorded["over_base_by_stretch"][f"{name} 0"], abs=1e-5
    )
