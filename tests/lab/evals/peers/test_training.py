"""Training beside a PyTorch loop, on a small random model."""

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.peers import training
from tests.tiny import write_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parity,
    pytest.mark.usefixtures("optax_promotes_dtypes"),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("training") / "model"), "float32")


def test_both_sides_have_the_same_losses(llm):
    """With decay, clipping and a learning rate that change the losses of the next steps."""
    strong = ["lr=1e-2", "weight_decay=5", "clip=0.01"]
    results = training.measure(llm, rows=2, context=24, rounds=4, settings=strong)
    jaxkv_losses, torch_losses = results["losses"].values()
    assert len(jaxkv_losses) == 5 and len(set(jaxkv_losses)) == 5
    np.testing.assert_allclose(jaxkv_losses, torch_losses, atol=5e-5)
    assert results["speed_over_torch"]["n"] == 4


def test_sides_that_differ_are_an_error(llm, monkeypatch):
    monkeypatch.setattr(training, "CLOSE", -1.0)
    with pytest.raises(SystemExit, match="do not train the same model"):
        training.measure(llm, rows=2, context=24, rounds=1)


def test_a_loss_that_is_nan_is_an_error(llm, monkeypatch):
    monkeypatch.setattr(training, "torch_step", lambda *_: lambda batch: float("nan"))
    with pytest.raises(SystemExit, match="got nan"):
        training.measure(llm, rows=2, context=24, rounds=1)
