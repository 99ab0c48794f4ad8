"""Products of weights and activations equal numpy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.decoder import matmul


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("columns", [(1, 1), (3, 1), (1, 5)])
@pytest.mark.parametrize(
    "shape", [(1024, 520), (1021, 520), (64, 172)]
)  # the first two are computed in parts
def test_products(rng, shape, columns, dtype, tolerance):
    weight = jnp.asarray(rng.standard_normal(shape), dtype)
    x = jnp.asarray(rng.standard_normal((shape[1], *columns)), dtype)
    exact = np.einsum("oi,ibt->obt", np.asarray(weight, np.float64), np.asarray(x, np.float64))
    found = jax.jit(matmul)(weight, x)
    assert found.dtype == dtype and found.shape == exact.shape
    np.testing.assert_allclose(
        found.astype(jnp.float32), exact, atol=tolerance * np.abs(exact).max()
    )
