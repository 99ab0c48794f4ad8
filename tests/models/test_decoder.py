"""Products of weights and activations, and decoders, equal numpy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.generation.streams import Stream
from jaxkv.models.network.decoder import linear
from tests.core import oracle
from tests.core.oracle.decoder import logits as decoder_logits
from tests.models.folders import write_model
from tests.models.test_parity import untokenized


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("columns", [(1, 1), (3, 1), (1, 5)])
@pytest.mark.parametrize(
    "shape", [(1024, 520), (1021, 520), (64, 172)]
)  # the first is computed in parts for one token
def test_products(rng, shape, columns, dtype, tolerance):
    weight = jnp.asarray(rng.standard_normal(shape), dtype)
    x = jnp.asarray(rng.standard_normal((*columns, shape[1])), dtype)
    exact = np.einsum("oi,bti->bto", np.asarray(weight, np.float64), np.asarray(x, np.float64))
    product = jax.jit(linear)(x, weight)
    assert product.dtype == dtype and product.shape == exact.shape
    np.testing.assert_allclose(
        product.astype(jnp.float32), exact, atol=tolerance * np.abs(exact).max()
    )


def test_a_product_in_half_precision_is_not_written_in_float32():
    x, weight, ct = (jnp.ones(shape, jnp.bfloat16) for shape in ((2, 3, 8), (4, 8), (2, 3, 4)))
    back = lambda x, weight, ct: jax.vjp(linear, x, weight)[1](ct)
    assert "f32" not in str(jax.make_jaxpr(back)(x, weight, ct))


@pytest.mark.parametrize(
    "family, theta",
    [
        ("llama_biases", 1e4),  # and biases
        ("mistral", 1e4),  # and sliding windows
        ("qwen3", 1e6),  # and norms of q and k
        ("yarn_new", oracle.yarn(16, 1e4, 4.0, 128, 24, 2)),
    ],
)
def test_the_decoder_equals_its_formulas(tmp_path, family, theta):
    """A chunk, and a token."""
    llm = untokenized(write_model(tmp_path, family))
    config, ids = llm.config, np.random.default_rng(1).integers(0, 256, 40).tolist()
    rules = [oracle.window(width) if width else oracle.full() for width in config.windows]
    expected = decoder_logits(
        llm.weights, ids, config.head_dim, config.norm_eps, theta, rules or [oracle.full()] * 3
    )
    stream = Stream(llm, "full")
    for end in (39, 40):
        stream.prefill([ids[stream.lengths[0] : end]])
        actual = stream.decoding.logits[0]
        np.testing.assert_allclose(actual, expected[end - 1], atol=1e-4, rtol=1e-4)
