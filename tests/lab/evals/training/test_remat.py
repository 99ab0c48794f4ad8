"""A training step with and without recomputed layers."""

import pytest

from jaxkv.evals.training import remat
from tests.models.training_data import small

pytestmark = pytest.mark.usefixtures("optax_promotes_dtypes")


@pytest.mark.slow
def test_both_forms_are_measured(monkeypatch):
    monkeypatch.setattr(remat, "VOCAB", 300)
    results = remat.measure(small("layers=3", "context=64"), 1)
    assert results["programs"].keys() == results["tokens_per_second"].keys() == set(remat.FORMS)
    without_remat, with_remat = (results["programs"][form] for form in remat.FORMS)
    assert (
        with_remat["temporaries"] < 0.7 * without_remat["temporaries"]
        and without_remat["compile"] > 0
    )
    assert results["speed_over_none"]["n"] == 1
