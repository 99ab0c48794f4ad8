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
