"""Signs of walks: the scan equals numpy, and the kernels equal the scan.

The kernels run on their hardware where the tests have it, and are interpreted elsewhere. They are
also compiled for TPU and GPU ahead of time, without the hardware.
"""

from __future__ import annotations

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from jaxkv.evals.lib.ahead import abstract_h100, reports_of
from jaxkv.pallas_kernels.sign_walk import api, gpu, reference, shapes

TAU = 1.0
MANY = shapes.WalkBenchShape(400, 256, 1, 32)  # 102,400 signs
ON = {"tpu": api.on_tpu, "gpu": api.on_gpu}
CHECKED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def interpreted(platform):
    """Whether the kernels of a platform are interpreted: true unless the tests run on it."""
    return jax.default_backend() != platform


def gram(shape, share=0.8):
    keys, values, thresholds, shift, gain = shapes.inputs(shape, share=share)
    return reference.gram(keys, values, shift, gain, TAU), thresholds


def plain(gram, thresholds):
    """The walk of the paper in numpy, step by step in float32."""
    gram, thresholds = np.asarray(gram), np.asarray(thresholds)
    s, signs, inner = (np.zeros_like(thresholds) for _ in range(3))
    for i in range(thresholds.shape[1]):
        inner[:, i] = s[:, i]
        exists = thresholds[:, i] < 2
        signs[:, i] = np.where(exists, np.where(s[:, i] < thresholds[:, i], 1, -1), 0)
        s += signs[:, i, None] * gram[:, i]
    return signs, inner


@pytest.mark.parametrize("name", shapes.SMALL)
def test_the_scan_equals_numpy(name):
    arguments = gram(shapes.SMALL[name])
    signs, inner = plain(*arguments)
    actual = reference.walk(*arguments)
    np.testing.assert_array_equal(actual[0], signs)
    np.testing.assert_array_equal(actual[1], inner)
    saturated = np.mean(np.abs(inner) > 0.5)
    assert 0 < saturated < 0.5, "the case must have random steps and certain steps"
    assert 0 < np.mean(signs == 0) < 0.3, "and absent steps"


def test_gram_matrices_are_those_of_the_formula():
    for name, shape in shapes.SMALL.items():
        keys, values, _, shift, gain = (np.asarray(x, np.float64) for x in shapes.inputs(shape))
        expected = np.zeros((shape.blocks, shape.steps, shape.steps))
        for p in range(shape.members):
            for q in range(shape.members):
                of_keys = np.einsum("mid,mjd->mij", keys[:, p], keys[:, q])
                of_values = np.einsum("mid,mjd->mij", values[:, p], values[:, q])
                kernel = np.exp(of_keys - shift[:, None, None]) * (of_values + TAU)
                expected += kernel * (1 if p == q else -1)
        expected *= gain[:, None, None]
        np.testing.assert_allclose(gram(shape)[0], expected, atol=2e-6, err_msg=name)


def test_the_gpu_kernel_equals_the_scan_bit_for_bit():
    # Interpreting the kernel is slow: a quarter of the walks then.
    many = MANY._replace(blocks=100) if interpreted("gpu") else MANY
    small = [shape for shape in shapes.SMALL.values() if gpu.supports(shape.steps)]
    for shape, share in [*((shape, 0.8) for shape in small), (many, 1.0)]:
        arguments = gram(shape, share)
        signs, inner = reference.walk(*arguments)
        actual = gpu.walk(*arguments, interpret=interpreted("gpu"))
        np.testing.assert_array_equal(actual[0], signs)
        np.testing.assert_array_equal(actual[1], inner)


@pytest.mark.slow
def test_the_tpu_kernel_has_no_race_and_no_uninitialized_read(capfd):
    for shape in (MANY, shapes.SMALL["pairs"]):
        check_products_and_walk(api.on_tpu, shape, CHECKED)
    assert "RACE" not in capfd.readouterr().out, "jax only prints races"


@pytest.mark.parametrize("platform", ON)
@pytest.mark.parametrize("name", shapes.SMALL)
def test_products_and_walk_give_the_same_signs(platform, name):
    check_products_and_walk(ON[platform], shapes.SMALL[name], interpreted(platform))


def check_products_and_walk(on, shape, interpret):
    """Signs must be equal until a step where s is close to its threshold."""
    arguments = shapes.inputs(shape, share=0.8)
    expected, inner = (np.asarray(x) for x in reference.balance(*arguments, TAU))
    signs, _ = on(*arguments, tau=TAU, interpret=interpret)
    for block, at in enumerate(np.argmax(np.asarray(signs) != expected, axis=1)):
        if signs[block, at] != expected[block, at]:
            assert abs(inner[block, at] - arguments[2][block, at]) < 1e-4


def test_leading_axes_are_independent_walks():
    keys, values, thresholds, shift, gain = shapes.inputs(shapes.WalkBenchShape(12, 16, 2, 8))
    lead = (2, 3, 2)
    shaped = [x.reshape(*lead, *x.shape[1:]) for x in (keys, values, thresholds, shift, gain)]
    walk = jax.jit(partial(api.balance_walk, tau=TAU))(*shaped)
    signs, inner = reference.balance(keys, values, thresholds, shift, gain, TAU)
    np.testing.assert_array_equal(walk.signs, signs.reshape(*lead, 16))
    np.testing.assert_allclose(walk.inner, inner.reshape(*lead, 16), atol=1e-6)
    assert walk.signs.dtype == jnp.int8


def test_unsupported_implementations_are_refused_by_name():
    wide = shapes.inputs(shapes.WalkBenchShape(2, 600, 1, 8))
    with pytest.raises(ValueError, match=r"600 steps .* by xla, pallas_gpu.*, got 'pallas_tpu'"):
        api.balance_walk(*wide, TAU, implementation="pallas_tpu")
    with pytest.raises(ValueError, match=r"got 'cuda'; leave implementation out"):
        api.balance_walk(*wide, TAU, implementation="cuda")
    np.testing.assert_array_equal(
        api.balance_walk(*wide, TAU).signs, reference.balance(*wide, TAU)[0]
    )


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")  # jax 0.12
@pytest.mark.parametrize("name", shapes.PROMPT)
def test_the_kernel_is_lowered_for_cuda(name):
    for implementation in ("pallas_gpu", None):
        with abstract_h100():
            function, args = call(shapes.PROMPT[name], implementation)
            text = function.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__gpu$xla.gpu.triton") == 1


def call(shape, implementation, place=None):
    """The jitted public function and the shapes of its arguments."""
    arguments = jax.eval_shape(partial(shapes.arguments, shape))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arguments]
    return jax.jit(partial(api.balance_walk, tau=TAU, implementation=implementation)), args


@pytest.fixture(scope="module")
def reports():
    return reports_of("tests.core.pallas_kernels.test_sign_walk")


@pytest.mark.slow
@pytest.mark.tpu_check
def test_a_tpu_compiles_the_largest_walks(reports):
    assert len(reports) == 2 * 2 * len(shapes.LARGEST)
    assert all(report["kernels"] == (report["what"] is None) for report in reports)


@pytest.mark.slow
@pytest.mark.tpu_check
def test_the_fused_walk_has_no_gram_matrix_in_memory(reports):
    """The control, the scan, has one in memory."""
    for report in reports:
        assert report["gram matrices"] == (report["what"] == "xla"), report
        if report["what"] is None:
            assert report["temporary"] < report["gram bytes"] / 8, report


def main() -> None:
    """Print one line of JSON per TPU generation, implementation and shape."""
    for kind in ("v5e:2x2", "v6e:2x2"):
        device = topologies.get_topology_desc(platform="tpu", topology_name=kind).devices[0]
        for implementation in (None, "xla"):
            for name, shape in shapes.LARGEST.items():
                function, args = call(shape, implementation, SingleDeviceSharding(device))
                compiled = function.lower(*args).compile()
                text, size = compiled.as_text(), shape.blocks * shape.steps**2
                report = {
                    "kind": kind,
                    "what": implementation,
                    "name": name,
                    "kernels": len(re.findall(r'custom_call_target="tpu_custom_call"', text)),
                    "gram matrices": any(
                        np.prod([int(x) for x in dimensions.split(",")]) == size
                        for dimensions in re.findall(r"f32\[([\d,]+)\]", text)
                    ),
                    "gram bytes": 4 * size,
                    "temporary": compiled.memory_analysis().temp_size_in_bytes,
                }
                print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
