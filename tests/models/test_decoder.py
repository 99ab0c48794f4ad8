"""Products of weights and activations equal numpy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.decoder import matmul
from jaxkv.models.xla_cpu import dot


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


def test_a_product_in_half_precision_is_not_written_in_float32():
    a, b, ct = (jnp.ones(shape, jnp.bfloat16) for shape in ((4, 8), (8, 2, 3), (4, 2, 3)))
    back = lambda a, b, ct: jax.vjp(lambda a, b: dot(a, b, (1, 0)), a, b)[1](ct)  # noqa: E731
    assert "f32" not in str(jax.make_jaxpr(back)(a, b, ct))
