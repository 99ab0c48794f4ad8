"""The error of attention under sampled caches."""

import numpy as np
import pytest

from jaxkv.contract import Spec
from jaxkv.evals.reservoir import attention_error
from jaxkv.rotary import rotary


@pytest.mark.slow
def test_a_sample_of_equal_tokens_is_exact_only_with_full_weights(monkeypatch):
    """All keys and values are zero but those of the sinks, so only their weights matter."""
    monkeypatch.setattr(attention_error, "EXPONENTS", (0.0, 1.0))
    q, k, v = (np.zeros((1024, n, 8), np.float32) for n in (2, 1, 1))
    v[:4] = 1
    spec, caches = Spec(1, 8, 8**-0.5, rotary(8, 1e4)), attention_error.policies()
    errors = attention_error.errors(spec, q, k, v, [0], caches)
    assert errors["reservoir, 1"] == pytest.approx(0, abs=1e-4)
    assert errors["reservoir, 0"] > 1
    assert errors["streaming"] > 1
