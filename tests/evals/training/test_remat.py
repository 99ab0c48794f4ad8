"""A training step with and without recomputed layers."""

import pytest

from jaxkv.evals.training import remat
from tests.models.training_data import small

pytestmark = pytest.mark.usefixtures("optax_promotes_dtypes")


@pytest.mark.slow
def test_both_forms_are_measured(monkeypatch):
    monkeypatch.setattr(remat, "VOCAB", 300)
    found = remat.measure(small("layers=3", "context=64"), 1)
    assert found["programs"].keys() == found["tokens_per_second"].keys() == set(remat.FORMS)
    most, least = (found["programs"][form] for form in remat.FORMS)
    assert least["temporaries"] < 0.7 * most["temporaries"] and most["compile"] > 0
    assert found["speed_over_none"]["n"] == 1


@pytest.mark.slow
@pytest.mark.tpu_check
def test_a_step_on_a_tpu_takes_less_memory(monkeypatch):
    recipe = small("layers=4", "context=256", "rows=32", "width=128")
    monkeypatch.setitem(remat.PRESETS, "160m", recipe)
    monkeypatch.setattr(remat, "VOCAB", 384)
    found = remat.on_tpu(1)
    assert found["layers"]["temporaries"] < 0.8 * found["none"]["temporaries"]
