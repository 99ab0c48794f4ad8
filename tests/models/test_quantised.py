"""Quantised weights: their rounding, their products, and the models that they make."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.decoding import compiled_decode_block
from jaxkv.models.generation.serving import make_engine
from jaxkv.models.loading.config import read_config
from jaxkv.models.loading.weight_names import shapes
from jaxkv.models.network import quantised as formats
from jaxkv.models.network.decoder import linear
from jaxkv.models.network.quantised import FORMATS, Int4Matrix, Int8Matrix, Quantised
from jaxkv.platform import cpu as xla_cpu
from jaxkv.serve.engine import Request, answer
from jaxkv.state.sharding import mesh_of
from tests.peak_memory import peak_of
from tests.tiny import write_tiny

POLICIES = ["streaming:sinks=2,window=14", "reservoir:sinks=2,window=6,sample=8", "full:start=64",
            "snapkv:capacity=12,window=4", "magicpig:K=2,L=6,sinks=1,window=4"]  # fmt: skip


@pytest.fixture(scope="module", params=FORMATS)
def quantised(llm_folder, request):
    return models.load(llm_folder, weights=request.param)


@pytest.fixture(scope="module")
def rounded(quantised):
    """The same model with each quantised matrix as floats: the reference."""
    weights = {
        name: jnp.asarray(dequantised(w)) if isinstance(w, Quantised) else w
        for name, w in quantised.weights.items()
    }
    return dataclasses.replace(quantised, weights=weights)


def dequantised(weight: Quantised) -> np.ndarray:
    """The values of a matrix, in numpy."""
    if isinstance(weight, Int8Matrix):
        return np.asarray(weight.values, np.float32) * np.asarray(weight.scale)[:, None]
    packed, (outputs, inputs) = np.asarray(weight.packed), weight.shape
    matrix = np.zeros((outputs, inputs), np.float32)
    for row in range(outputs):
        half, at = divmod(row, outputs // 2)
        values = (packed[at] >> 4 if half else packed[at] & 15).astype(np.float32)
        for group in range(inputs // 32):
            part = slice(32 * group, 32 * group + 32)
            scale, minimum = (float(a[at, half, group]) for a in weight[1:])
            matrix[row, part] = values[part] * scale + minimum
    return matrix


@pytest.mark.parametrize("offset", [0, 0.1, -3, 2000.3, -2000.3, 40000, -65503.0])
@pytest.mark.parametrize("spread", [0, 1e-8, 1e-6, 2e-3, 0.6, 30, 500])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_no_weight_moves_by_more_than_half_a_scale(weight_format, offset, spread):
    """Also where float16 rounds the minimum or the scale of a group coarsely."""
    weight = offset + spread * np.random.default_rng(0).random((8, 64))
    weight[0, 0], weight[-1, -1] = offset, offset + spread
    weight = weight.astype(np.float32)
    rounded = formats.quantise("q", weight, weight_format)
    scale = np.asarray(rounded.scale, np.float64)
    if weight_format == "int4":  # [R,2,G] -> a scale per weight
        scale = np.repeat(np.concatenate([scale[:, 0], scale[:, 1]]), 32, axis=1)
    else:
        scale = scale[:, None]
    rounding = 2 * np.spacing(np.abs(weight))  # of products in float32
    assert (np.abs(dequantised(rounded) - weight) <= 0.5001 * scale + rounding).all()


@pytest.mark.parametrize("tiny", [1e-45, 1e-44, 1e-38, -1e-38, 1.4e-36])
def test_a_row_whose_scale_would_be_subnormal_is_zeros(tiny):
    """XLA would read the scale as 0; numpy would divide by 0, or round the row to other values."""
    weight = np.full((3, 64), tiny, np.float32)
    weight[1], weight[2, ::2] = np.linspace(-1, 1, 64), 1.0
    matrix = formats.quantise("q", weight, "int8")
    assert not matrix.values[0].any() and matrix.scale[0] == 1
    assert (np.abs(matrix.values[1:]).max(axis=1) == 127).all()
    assert np.abs(dequantised(matrix) - weight).max() <= 0.5001 / 127


def test_the_values_of_a_q4_1_file_stay_as_they_are(rng):
    """A block of Q4_1 has a least value and a step in float16, and uses 0 and 15."""
    steps = rng.uniform(1e-3, 1, (6, 2)).astype(np.float16).astype(np.float32)[..., None]
    minimum = -steps * rng.integers(5, 10, (6, 2, 1)) * 1.25
    minimum = minimum.astype(np.float16).astype(np.float32)
    values = rng.integers(0, 16, (6, 2, 32))
    values[..., 0], values[..., 1] = 0, 15
    weight = (values * steps + minimum).reshape(6, 64).astype(np.float32)
    matrix = formats.quantise("layers.3.down", weight, "int4")
    np.testing.assert_allclose(dequantised(matrix), weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("embed", (64, 64)), ("head", (64, 64)), ("layers.0.q", (63, 64)), ("layers.0.q", (64, 48))],
)
def test_ends_and_shapes_that_do_not_divide_are_in_int8(name, shape):
    assert isinstance(formats.quantise(name, np.ones(shape, "f4"), "int4"), Int8Matrix)
    assert isinstance(formats.shapes(name, shape, "int4"), Int8Matrix)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(bad, weight_format):
    weight = np.ones((2, 32), np.float32)
    weight[1, 1] = bad
    with pytest.raises(
        UserError, match=rf"{weight_format} must be finite, and layers\.0\.q has NaN or inf"
    ):
        formats.quantise("layers.0.q", weight, weight_format)


def test_a_weight_beyond_the_scales_is_named():
    weight = np.zeros((2, 32), np.float32)
    weight[0, 3] = 7e4
    with pytest.raises(
        UserError, match=r"int4 must be at most 65,504, and layers\.1\.up has 70,000"
    ):
        formats.quantise("layers.1.up", weight, "int4")
    assert formats.quantise("layers.1.up", weight, "int8").scale[0] == np.float32(7e4 / 127)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (2, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [2**20, 64], ids=["whole", "blocks"])
def test_products_are_those_of_the_rounded_matrix(
    rng, monkeypatch, shape, dtype, block, weight_format
):
    monkeypatch.setattr(xla_cpu, "WIDENED", block)
    matrix = formats.quantise("q", rng.normal(size=(24, 64)), weight_format)
    weight = jax.tree.map(jnp.asarray, matrix)
    x = jnp.asarray(rng.normal(size=(*shape, 64)), dtype)
    exact = np.einsum("oi,bti->bto", dequantised(weight), np.asarray(x, np.float32))
    near = 1e-5 if dtype == "float32" else 0.06
    np.testing.assert_allclose(jax.jit(linear)(x, weight).astype("f4"), exact, near, near)
    wide = linear(x, weight, dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    # In half precision the values of int4 are rounded to it, but not those of int8.
    close = 1e-5 if dtype == "float32" or weight_format == "int8" else 0.06
    np.testing.assert_allclose(wide, exact, close, close)


def test_a_loaded_model_has_a_part_of_the_bytes(llm, quantised):
    for name, weight in llm.weights.items():
        loaded = quantised.weights[name]
        assert isinstance(loaded, Quantised) == (weight.ndim == 2)
        if isinstance(loaded, Int8Matrix):
            assert loaded.values.nbytes * 4 == weight.nbytes
        if isinstance(loaded, Int4Matrix):
            assert loaded.packed.nbytes * 8 == weight.nbytes
    of_layers = [w for name, w in quantised.weights.items() if name.endswith((".q", ".gate"))]
    assert {w.FORMAT for w in of_layers} == {quantised.weight_format} and not llm.weight_format


@pytest.mark.parametrize("policy", POLICIES)
def test_text_is_that_of_the_rounded_weights(quantised, rounded, policy):
    prompt = [65 + number % 26 for number in range(30)]
    actual, expected = (
        models.generate(llm, prompt, policy, 24, ignore_eos=True) for llm in (quantised, rounded)
    )
    assert actual.tokens == expected.tokens
    assert actual.state_bytes == expected.state_bytes


@pytest.mark.parametrize("weight_format", FORMATS)
def test_decoding_holds_no_float_copy_of_the_model(tmp_path, weight_format):
    folder = write_tiny(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    llm = models.load(folder, weights=weight_format)
    stream = models.Stream(llm, POLICIES[0])
    arguments = stream.decode_arguments(stream.decoding, models.Sampling(), (), 1)
    memory = compiled_decode_block().lower(*arguments).compile().memory_analysis()
    sizes = [np.prod(w.shape) for w in llm.weights.values() if isinstance(w, Quantised)]
    assert memory.temp_size_in_bytes < 3 * 4 * max(sizes) < sum(sizes)


@pytest.mark.parametrize("policy", [POLICIES[0], f"{POLICIES[0]},storage=int8"])
def test_answers_of_the_engine_do_not_depend_on_neighbours(quantised, policy):
    """No bit of the log probabilities does, with float caches and with those in int8."""
    requests = [Request(tuple(range(3, 3 + n)), 12, logprobs=3) for n in (5, 17, 30)]
    engine = make_engine(quantised, policy, max_batch=3, max_len=64, chunk=16)
    in_int8 = any(leaf.dtype == np.int8 for leaf in jax.tree.leaves(engine._running._batch.states))
    assert in_int8 == policy.endswith("int8")
    together = [collected.scored for collected in answer(engine, requests)]
    alone = [answer(engine, [request])[0].scored for request in requests]
    assert together == alone and all(len(scored) == 12 for scored in together)
    assert all(np.isfinite(scored_token.logprob) for scored in together for scored_token in scored)


MEASURE = """
from jaxkv import models
jnp.zeros(8).block_until_ready()
if sys.argv[2]:
    llm = models.load(sys.argv[1], "float32", weights=sys.argv[2])
    assert llm.weight_format == sys.argv[2]
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
def test_loading_needs_less_than_the_float_model_and_one_tensor(tmp_path):
    """The largest tensor is in memory as floats once, and no other one with it."""
    sizes = {"vocab_size": 80_000, "hidden_size": 256, "num_hidden_layers": 6}
    folder = write_tiny(tmp_path, **sizes, intermediate_size=2048, tie_word_embeddings=True)
    config = read_config(folder)
    weights = [4 * int(np.prod(shape)) for _, shape in shapes(config).values()]
    used = peak_of(MEASURE, str(folder), "int8") - peak_of(MEASURE, str(folder), "")
    assert sum(weights) / 4 < used < sum(weights) + max(weights), f"{used / sum(weights):.2f}"


@pytest.mark.parametrize("weights", ["int3", "float32", ""])
def test_other_formats_are_refused(llm_folder, weights):
    with pytest.raises(UserError, match="weights must be int8 or int4, got"):
        models.load(llm_folder, weights=weights)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_quantised_weights_over_a_mesh_are_refused(llm_folder, weight_format):
    with pytest.raises(
        UserError, match=f"weights in {weight_format} run on one device, got a mesh"
    ):
        models.load(llm_folder, mesh=mesh_of("data=2"), weights=weight_format)


def test_blocks_of_rows_do_not_change_int8(rng, monkeypatch):
    weight = rng.normal(size=(7, 40)).astype(np.float32)
    unblocked = formats.quantise("q", weight, "int8")
    monkeypatch.setattr(formats, "BLOCK", 100)  # two rows at a time, then one
    for actual, expected in zip(formats.quantise("q", weight, "int8"), unblocked, strict=True):
        np.testing.assert_array_equal(actual, expected)
