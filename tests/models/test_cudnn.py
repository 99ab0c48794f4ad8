"""cuDNN's flash attention on an NVIDIA GPU: values and gradients equal those of plain XLA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Spec
from jaxkv.models.network import uncached
from jaxkv.rotary import rotary

GPU = next((d for d in jax.devices() if d.platform == "gpu"), None)
pytestmark = pytest.mark.skipif(GPU is None, reason="no NVIDIA GPU")
HEADS, KV_HEADS, DIM = 4, 2, 64
CASES = {
    "plain": {},
    "window": {"window": 100},
    "zero sink": {"sink_logits": np.zeros(HEADS, np.float32)},
    "learned sinks": {"sink_logits": np.array([-2, 0.5, 1, 3], np.float32)},
}


@pytest.mark.parametrize("tokens", [128, 300, 2048])
@pytest.mark.parametrize("case", CASES)
def test_cudnn_equals_xla(rng, case, tokens):
    window, zero = CASES[case].get("window"), CASES[case].get("sink_logits")
    shapes = ((2, tokens, HEADS, DIM), *((2, tokens, KV_HEADS, DIM),) * 2)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    if case == "learned sinks":
        arrays.append(jnp.asarray(zero))
    spec = Spec(KV_HEADS, DIM, DIM**-0.5, rotary(DIM, 100.0), dtype="bfloat16")

    def out(implementation, q, k, v, sink_logits=zero):
        attend = partial(uncached.attend, implementation=implementation)
        return attend(window, spec, q, k, v, sink_logits)[0].astype(jnp.float32)

    def gradients(implementation, *arguments):
        value = lambda *a: jnp.sum(jnp.sin(out(implementation, *a)))  # noqa: E731
        return jax.jit(jax.grad(value, tuple(range(len(arguments)))))(*arguments)

    exact = [a.astype(jnp.float32) for a in arrays]
    values = [
        np.asarray(jax.jit(out, static_argnums=0)(name, *arrays)) for name in ("cudnn", "xla")
    ]
    np.testing.assert_allclose(values[0], values[1], atol=0.03)
    expected_gradients = gradients("xla", *exact)
    for actual, expected in zip(gradients("cudnn", *arrays), expected_gradients, strict=True):
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(actual.astype(jnp.float32), expected, atol=0.03 * scale)
