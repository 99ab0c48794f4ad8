"""Weights in int8: their rounding, their products, and the models that they make."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.engine import Request, answer
from jaxkv.errors import UserError
from jaxkv.models import int8, xla_cpu
from jaxkv.models.decoder import matmul, product
from jaxkv.models.decoding import compiled_decode_block
from jaxkv.models.serving import make_engine
from jaxkv.state.sharding import mesh_of
from tests.tiny import write_tiny

POLICIES = ["streaming:sinks=2,window=14", "reservoir:sinks=2,window=6,sample=8", "full:start=64",
            "snapkv:capacity=12,window=4", "magicpig:K=2,L=6,sinks=1,window=4"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def quantised(folder):
    return models.load(folder, weights="int8")


@pytest.fixture(scope="module")
def rounded(folder, quantised):
    """The same model with each quantised matrix as floats: the reference."""
    weights = {
        name: jnp.asarray(dequantised(w)) if isinstance(w, int8.Quantised) else w
        for name, w in quantised.weights.items()
    }
    return dataclasses.replace(quantised, weights=weights)


def dequantised(weight: int8.Quantised) -> np.ndarray:
    return np.asarray(weight.values, np.float32) * np.asarray(weight.scale)[:, None]


def test_a_row_is_rounded_to_multiples_of_its_scale(rng):
    weight = rng.normal(size=(7, 40)).astype(np.float32) * 10.0 ** np.arange(-3, 4)[:, None]
    weight[2] = 0
    found = int8.quantise("q", weight)
    assert found.values.dtype == np.int8 and found.scale.dtype == np.float32
    error = np.abs(dequantised(found) - weight)
    assert (error <= found.scale[:, None] * 0.5001).all()
    rows = np.delete(np.arange(7), 2)
    assert (np.abs(found.values[rows]).max(axis=1) == 127).all()
    assert not found.values[2].any() and found.scale[2] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(bad):
    weight = np.ones((2, 3), np.float32)
    weight[1, 1] = bad
    with pytest.raises(UserError, match=r"layers\.0\.q has NaN or infinity"):
        int8.quantise("layers.0.q", weight)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (2, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [2**20, 64], ids=["whole", "blocks"])
def test_products_are_those_of_the_rounded_matrix(rng, monkeypatch, shape, dtype, block):
    monkeypatch.setattr(xla_cpu, "_BLOCK", block)
    weight = jax.tree.map(jnp.asarray, int8.quantise("q", rng.normal(size=(24, 16))))
    x = jnp.asarray(rng.normal(size=(16, *shape)), dtype)
    exact = np.einsum("oi,ibt->obt", dequantised(weight), np.asarray(x, np.float32))
    near = 1e-5 if dtype == "float32" else 0.03
    np.testing.assert_allclose(jax.jit(matmul)(weight, x).astype("f4"), exact, near, near)
    wide = matmul(weight, x, jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, exact, 1e-5, 1e-5)
    if dtype != "float32":
        return  # in half precision jax 0.7 has no other product on a CPU
    last = product(x, weight, (0, 1), axis=2)
    np.testing.assert_allclose(last.astype("f4"), exact.transpose(1, 2, 0), near, near)
    first = product(weight, x.transpose(1, 2, 0), (1, 2), axis=0)
    np.testing.assert_allclose(first.astype("f4"), exact, near, near)


def test_a_loaded_model_has_a_quarter_of_the_bytes(folder, quantised):
    plain = models.load(folder)
    for name, weight in plain.weights.items():
        found = quantised.weights[name]
        assert isinstance(found, int8.Quantised) == (weight.ndim == 2)
        if weight.ndim == 2:
            assert found.values.nbytes * 4 == weight.nbytes
    assert quantised.quantised and not plain.quantised


@pytest.mark.parametrize("policy", POLICIES)
def test_text_is_that_of_the_rounded_weights(quantised, rounded, policy):
    prompt = [65 + number % 26 for number in range(30)]
    found, wanted = (
        models.generate(llm, prompt, policy, 24, ignore_eos=True) for llm in (quantised, rounded)
    )
    assert found.tokens == wanted.tokens
    assert found.state_bytes == wanted.state_bytes


def test_losses_are_those_of_the_rounded_weights(quantised, rounded, rng):
    ids = rng.integers(2, 258, 60).tolist()
    found, wanted = (models.score(llm, ids, POLICIES[0]).losses for llm in (quantised, rounded))
    np.testing.assert_allclose(found, wanted, 1e-4, 1e-4)


def test_decoding_holds_no_float_copy_of_the_model(tmp_path):
    folder = write_tiny(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    llm = models.load(folder, weights="int8")
    stream = models.Stream(llm, POLICIES[0])
    arguments = stream.decode_arguments(stream.decoding, models.Sampling(), (), 1)
    memory = compiled_decode_block().lower(*arguments).compile().memory_analysis()
    matrices = [w for w in llm.weights.values() if isinstance(w, int8.Quantised)]
    largest = max(4 * matrix.values.size for matrix in matrices)
    assert memory.temp_size_in_bytes < 3 * largest < sum(m.values.size for m in matrices)


def test_answers_of_the_engine_do_not_depend_on_neighbours(quantised):
    requests = [Request(tuple(range(3, 3 + n)), 12) for n in (5, 17, 30)]
    engine = make_engine(quantised, POLICIES[0], max_batch=3, max_len=64, chunk=16)
    together = [collected.tokens for collected in answer(engine, requests)]
    alone = [answer(engine, [request])[0].tokens for request in requests]
    assert together == alone


@pytest.mark.parametrize("weights", ["int4", "float32", ""])
def test_other_formats_are_refused(folder, weights):
    with pytest.raises(UserError, match="weights must be int8"):
        models.load(folder, weights=weights)


def test_int8_over_a_mesh_is_refused(folder):
    with pytest.raises(UserError, match="one device, got a mesh"):
        models.load(folder, mesh=mesh_of("data=2"), weights="int8")
