"""The kernels in Mosaic GPU, interpreted, and lowered for an NVIDIA GPU without one.

The interpreter of Mosaic GPU runs the copies and barriers of a kernel on a CPU. It fills memory
with NaN, and raises an error for a race or for an access out of bounds.
"""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv.pallas_kernels import mosaic
from jaxkv.pallas_kernels.sign_walk import api, reference, shapes
from tests.pallas_kernels import test_sign_walk as walks

pytestmark = pytest.mark.skipif(
    not mosaic.is_available(), reason="this jax has no Mosaic GPU, or an older interface of it"
)
CUSTOM_CALL = "@mosaic_gpu_v2"


def interpreted():
    return mosaic.plgpu.InterpretGPUParams(detect_races=True)


def test_walks_equal_the_scan_bit_for_bit():
    """Two groups of walks, the second one padded, of a padded number of steps."""
    given = walks.gram(shapes.BenchShape(11, 40, 1, 24))
    signs, inner = reference.walk(*given)
    found = api.on_mosaic_gpu("walk", {}, *given, interpret=interpreted())
    np.testing.assert_array_equal(found[0], signs)
    np.testing.assert_array_equal(found[1], inner)


def test_products_and_walk_give_the_same_signs():
    walks.check_products_and_walk(api.on_mosaic_gpu, shapes.SMALL["pairs"], interpreted())


@pytest.mark.parametrize("what", ["walk", "balance"])
@pytest.mark.parametrize("name", shapes.PROMPT)
def test_the_walk_is_lowered_for_cuda(what, name):
    shape = shapes.PROMPT[name]
    assert CUSTOM_CALL in walks.lowered(what, shape, "mosaic_gpu", ("cuda",))
    with walks.abstract_h100():
        assert CUSTOM_CALL not in walks.lowered(what, shape, None, ("cuda",)), "never by itself"
