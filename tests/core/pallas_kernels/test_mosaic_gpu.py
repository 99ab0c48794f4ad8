"""The kernels in Mosaic GPU, interpreted, and lowered and compiled for an NVIDIA GPU without one.

The kernels run on a GPU where the tests have one, which must be Hopper or later. Elsewhere they are
interpreted. The interpreter runs the copies and barriers of a kernel on a CPU. It fills memory with
NaN, and raises an error for a race or for an access out of bounds.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxkv.evals.lib.ahead import abstract_h100, h100, reports_of
from jaxkv.pallas_kernels import mosaic, sampled_attention, sign_walk
from jaxkv.pallas_kernels.sampled_attention import mosaic_gpu
from jaxkv.pallas_kernels.sign_walk import api, reference
from tests.core.pallas_kernels import test_sampled_attention as attention
from tests.core.pallas_kernels import test_sign_walk as walks

pytestmark = pytest.mark.skipif(
    not mosaic.is_available(), reason="this jax has no Mosaic GPU, or an older interface of it"
)
CUSTOM_CALL = "@mosaic_gpu_v2"


def interpreted():
    """How kernels are interpreted: None where the tests run on a GPU."""
    if jax.default_backend() == "gpu":
        return None
    return mosaic.plgpu.InterpretGPUParams(detect_races=True)


def test_walks_equal_the_scan_bit_for_bit():
    """Two groups of walks, the second one padded, of a padded number of steps."""
    arguments = walks.gram(sign_walk.shapes.WalkBenchShape(11, 40, 1, 24))
    signs, inner = reference.walk(*arguments)
    actual = api.on_mosaic_gpu("walk", {}, *arguments, interpret=interpreted())
    np.testing.assert_array_equal(actual[0], signs)
    np.testing.assert_array_equal(actual[1], inner)


def test_products_and_walk_give_the_same_signs():
    walks.check_products_and_walk(api.on_mosaic_gpu, sign_walk.shapes.SMALL["pairs"], interpreted())


@pytest.mark.parametrize("kernel", ["walk", "balance"])
@pytest.mark.parametrize("name", sign_walk.shapes.PROMPT)
def test_the_walk_is_lowered_for_cuda(kernel, name):
    shape = sign_walk.shapes.PROMPT[name]
    assert CUSTOM_CALL in walks.lowered(kernel, shape, "mosaic_gpu", ("cuda",))
    with abstract_h100():
        assert CUSTOM_CALL not in walks.lowered(kernel, shape, None, ("cuda",)), "never by itself"


@pytest.mark.parametrize(
    "dtype, weight, softcap",
    [
        ("float32", "log", 2.0),
        ("float32", "none", None),
        ("float32", "angles", 2.0),
        ("bfloat16", "log", None),
        ("float16", "angles", None),
    ],
)
def test_sampled_attention_is_the_softmax(monkeypatch, dtype, weight, softcap):
    """Of no slot, of one, of all and of some, so that a part has up to two of three blocks."""
    monkeypatch.setattr(mosaic_gpu, "BLOCK", 16)
    monkeypatch.setattr(mosaic_gpu, "PROGRAMS", 8)
    shape = sampled_attention.shapes.AttentionBenchShape(1, 4, 2, 65, 64, 40, dtype)
    arguments = sampled_attention.shapes.inputs(shape, weight)
    settings = attention.settings_of(weight, softcap)
    actual = mosaic_gpu.attend(settings, *arguments, interpret=interpreted())
    attention.check(actual, settings, arguments, 1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("dtype, weight", [("float32", "angles"), ("bfloat16", "log")])
def test_sampled_attention_is_lowered_for_cuda(dtype, weight):
    shape = sampled_attention.shapes.LARGEST._replace(dtype=dtype)
    text = lowered(shape, weight, "mosaic_gpu")
    assert text.count(CUSTOM_CALL) == 2, "one kernel for keys, one for values"
    assert not attention.has_gathered_array(text, shape)
    with abstract_h100():
        assert CUSTOM_CALL not in lowered(shape, weight, None), "never by itself"


def lowered(shape, weight, implementation):
    function, args = attention.call(shape, weight, implementation)
    return function.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_caches_that_cannot_be_copied_are_refused():
    for head_dim, dtype in ((16, "float32"), (32, "bfloat16"), (512, "bfloat16")):
        shape = sampled_attention.shapes.LARGEST._replace(head_dim=head_dim, dtype=dtype)
        with pytest.raises(ValueError, match=r"is supported by .* got 'mosaic_gpu'"):
            lowered(shape, "none", "mosaic_gpu")
    with pytest.raises(ValueError, match=r"1025 steps is supported by xla, got 'mosaic_gpu'"):
        walks.lowered(
            "walk", sign_walk.shapes.WalkBenchShape(1, 1025, 1, 8), "mosaic_gpu", ("cuda",)
        )


@pytest.mark.slow
@pytest.mark.gpu_check
def test_an_h100_compiles_the_kernels_without_spills():
    reports = reports_of("tests.core.pallas_kernels.test_mosaic_gpu")
    assert len(reports) == len(sign_walk.shapes.PROMPT) + len(attention.DTYPES)
    for report in reports:
        assert report["targets"] == ["sm_90a"], report
        assert report["spilled"] == [0] * report["kernels"], report


def main() -> None:
    """Print one line of JSON per shape of walks and dtype of caches.

    Other functions and weights have the same kernels, which a process compiles once.
    """
    place = SingleDeviceSharding(h100())
    for name, shape in sign_walk.shapes.PROMPT.items():
        compiled = report(*walks.call("walk", shape, "mosaic_gpu", place))
        print(json.dumps({"walks": name, **compiled}), flush=True)
    for dtype in attention.DTYPES:
        shape = sampled_attention.shapes.LARGEST._replace(dtype=dtype)
        compiled = report(*attention.call(shape, "angles", "mosaic_gpu", place))
        print(json.dumps({"dtype": dtype, **compiled}), flush=True)


def report(function, args) -> dict:
    """What the assembler says about the kernels of a compiled function."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        text = function.lower(*args).compile().as_text()
        said = "".join(path.read_text() for path in Path(folder).glob("*.ptxas"))
    return {
        "kernels": text.count('custom_call_target="mosaic_gpu_v2"'),
        "targets": sorted(set(re.findall(r"for '(sm_\w+)'", said))),
        "spilled": [int(size) for size in re.findall(r"(\d+) bytes spill stores", said)],
    }


if __name__ == "__main__":
    main()
