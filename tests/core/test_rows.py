"""Rows in int8: rounding, what is not finite, gradients, and states that do not fit each other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import rows
from jaxkv.errors import UserError
from jaxkv.policies import Streaming, Window
from jaxkv.rotary import rotary
from jaxkv.rows import Int8Rows
from jaxkv.state import batch
from tests.core import oracle

SPEC = jaxkv.Spec(kv_heads=2, head_dim=64, scale=0.125, encoding=rotary(64, 10000.0))


def quantised(x) -> Int8Rows:
    return jax.jit(rows.quantise)(jnp.asarray(x, jnp.float32))


def test_no_element_moves_by_more_than_half_a_scale(rng):
    sizes = 10.0 ** rng.uniform(-30, 30, (1, 2, 500, 1))
    offsets = np.where(np.arange(500) % 2, 1000.0, 0)[:, None]  # rows far from 0 have coarse scales
    x = ((rng.normal(size=(1, 2, 500, 64)) + offsets) * sizes).astype(np.float32)
    stored = quantised(x)
    scale = np.asarray(stored.scale, np.float64)
    assert np.abs(np.asarray(stored.values)).max() == 127
    assert (np.abs(np.asarray(stored.values) * scale - x) <= scale * (0.5 + 1e-5)).all()
    assert (scale <= np.abs(x).max(-1, keepdims=True) / 127 * (1 + 2**-8)).all()
    near = x[:, :, ::2]  # far rows have elements half a scale from two multiples
    expected = oracle.in_int8(near.astype(np.float64))
    np.testing.assert_allclose(rows.dequantise(stored)[:, :, ::2], expected, 1e-6)


@pytest.mark.parametrize("x", [0.0, -0.0, 1e-45, 1e-38, 1e-36, -3.4e38])
def test_small_and_large_rows_stay_finite(x):
    row = np.full((1, 1, 1, 64), x, np.float32)
    restored = np.asarray(rows.dequantise(quantised(row)))
    assert np.isfinite(restored).all()
    np.testing.assert_allclose(restored, row, rtol=5e-3, atol=1e-38)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan_and_others_are_not(bad):
    x = np.ones((1, 2, 3, 64), np.float32)
    x[0, 1, 2, 5] = bad
    restored = np.asarray(rows.dequantise(quantised(x)))
    assert np.isnan(restored[0, 1, 2]).all() and np.isfinite(restored[0, 0]).all()
    assert np.isfinite(restored[0, 1, :2]).all()


@pytest.mark.parametrize("policy", [Streaming(1, 4), Streaming(1, 4, storage="int8")])
def test_the_output_is_nan_as_with_floats(policy, rng):
    step = jax.jit(partial(jaxkv.step, policy, SPEC))
    for which in (1, 2):  # a key, a value
        state = policy.init(SPEC, 1, jax.random.key(0))
        x = rng.normal(size=(3, 1, 5, 2, 64)).astype(np.float32)
        x[which, 0, 2] = np.nan
        for at in range(5):
            place = jnp.full((1, 1), at, jnp.uint32), jnp.ones((1, 1), bool)
            out, state = step(state, *jnp.asarray(x[:, :, at : at + 1]), *place)
            assert np.isnan(out).any() == (at >= 2)


@pytest.mark.parametrize("dtype, max_ratio", [("float32", 0.27), ("bfloat16", 0.53)])
def test_bytes_at_head_dim_64(dtype, max_ratio):
    spec = jaxkv.Spec(3, 64, 0.125, SPEC.encoding, dtype=dtype)
    floats, int8 = (
        Streaming(4, 1020, storage=c).bytes_per_sequence(spec) for c in ("float", "int8")
    )
    assert int8 / floats <= max_ratio


def test_states_in_int8_and_in_floats_do_not_mix(tmp_path):
    policies = Window(8), Window(8, "int8")
    zeros = jnp.zeros((1, 1, 2, 64))
    token = zeros, zeros, zeros, jnp.zeros((1, 1), jnp.uint32), jnp.ones((1, 1), bool)
    for policy, other_storage in (policies, policies[::-1]):
        state, wrong = (p.init(SPEC, 1, jax.random.key(0)) for p in (policy, other_storage))
        batch.save(tmp_path / "state", wrong)
        for mixed_call in (
            lambda policy=policy, wrong=wrong: jaxkv.step(policy, SPEC, wrong, *token),
            lambda state=state, wrong=wrong: batch.put(state, [0], wrong),
            lambda state=state: batch.load(tmp_path / "state", state),
        ):
            with pytest.raises(UserError, match="storage=") as raised:
                mixed_call()
            assert "\n" not in str(raised.value)
