"""Bucket counts equal numpy, for even, empty and crowded buckets and both types of entries."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.evals.lib.ahead import abstract_h100
from jaxkv.pallas_kernels.bucket_counts import bucket_counts, gpu, reference
from jaxkv.platform import gpu as xla_gpu
from jaxkv.policies.magicpig import hash_tables
from tests.core.pallas_kernels.test_sign_walk import interpreted

ON = {"xla": reference.count, "gpu": partial(gpu.count, interpret=interpreted("gpu"))}
BATCH, HEADS, KV_HEADS, TABLES, BITS = 2, 6, 2, 5, 3


@pytest.mark.parametrize("kind", ["even", "one bucket", "empty"])
@pytest.mark.parametrize("keys", [9, 1300])
@pytest.mark.parametrize("name", ON)
def test_counts_are_those_of_equal_codes(name, keys, kind):
    rng = np.random.default_rng(keys)
    key_codes = rng.integers(0, 1 << BITS, (BATCH, KV_HEADS, TABLES, keys))
    if kind == "one bucket":
        key_codes = np.full_like(key_codes, 5)
    valid = np.full((BATCH, KV_HEADS, keys), kind != "empty")
    valid[1, :, keys // 2 :] = False
    codes = rng.integers(0, 1 << BITS, (BATCH, HEADS, TABLES))
    codes[0] = 5
    tables = [
        [hash_tables.build(*head, BITS) for head in zip(*heads, strict=True)]
        for heads in zip(jnp.asarray(key_codes, jnp.int32), jnp.asarray(valid), strict=True)
    ]
    entries, first = (
        jnp.stack([jnp.stack([getattr(head, leaf) for head in row]) for row in tables])
        for leaf in ("entries", "first")
    )
    shared = np.repeat(key_codes, HEADS // KV_HEADS, 1) == codes[..., None]
    expected = shared.sum(2) * np.repeat(valid, HEADS // KV_HEADS, 1)
    counts = ON[name](entries, first, jnp.asarray(codes, jnp.int32), keys)
    np.testing.assert_array_equal(counts, expected)


def test_an_implementation_that_is_not_supported_is_refused():
    entries, first = jnp.zeros((1, 1, 1, 1, 1), jnp.int32), jnp.zeros((1, 1, 1, 3), jnp.int32)
    codes = jnp.zeros((1, 1, 1), jnp.int32)
    with pytest.raises(ValueError, match="leave it out"):
        bucket_counts(entries, first, codes, 1, implementation="pallas_tpu")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")  # jax 0.12
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_the_kernel_is_lowered_for_cuda(dtype):
    shapes = ((1, 2, 150, 3000, 16), dtype), ((1, 2, 150, 1025), "int32"), ((1, 6, 150), "int32")
    arguments = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in shapes]
    with abstract_h100():
        counts = jax.jit(partial(gpu.count, places=30_000))
        text = counts.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("platform, triton, at_once", [
    ("gpu", True, True), ("gpu", False, False), ("cpu", True, False), ("tpu", True, False),
])  # fmt: skip
def test_the_loops_remain_where_there_is_no_kernel(monkeypatch, platform, triton, at_once):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(gpu, "is_supported", lambda: triton)
    assert xla_gpu.finds_at_once(jnp.zeros((1, 1, 1, 1, 1), jnp.int32)) == at_once
