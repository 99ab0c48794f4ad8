"""A plain window is streaming without sinks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Spec
from jaxkv.driver import step
from jaxkv.policies import Streaming, Window
from jaxkv.rotary import rotary

SPEC = Spec(kv_heads=1, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0))


def test_a_window_is_streaming_without_sinks(rng):
    q, k, v = (jnp.asarray(rng.normal(size=(1, 11, 1, 8)), jnp.float32) for _ in range(3))
    positions = jnp.arange(11, dtype=jnp.uint32)[None]
    outs = []
    for policy in (Window(4), Streaming(0, 4), Streaming(0, 4, "absolute")):
        state = policy.init(SPEC, 1, jax.random.key(0))
        jitted_step = jax.jit(functools.partial(step, policy, SPEC))
        outs.append(jitted_step(state, q, k, v, positions, jnp.ones((1, 11), bool))[0])
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-6)
    np.testing.assert_allclose(outs[0], outs[2], atol=1e-6)
