"""`jaxkv.step` between the projections of other libraries: linen, Equinox, plain JAX.

Nothing is registered or patched. Each example is one attention layer that stores the policy's state
in the way of its library. Prefill in chunks gives the outputs of the plain JAX layer.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.rotary import rotary

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 8
SPEC = jaxkv.Spec(KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, rotary(HEAD_DIM, 10000.0))
POLICY = jaxkv.policy("streaming:sinks=2,window=6")
SIZES = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}


@pytest.fixture
def weights(rng):
    shapes = {name: (WIDTH, size) for name, size in SIZES.items()} | {"o": (SIZES["q"], WIDTH)}
    return {n: jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for n, s in shapes.items()}


@pytest.fixture
def chunks(rng):
    """Two sequences of 21 tokens in chunks of 7: x [B,T,D] and positions."""
    x = jnp.asarray(rng.normal(size=(2, 21, WIDTH)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(21, dtype=jnp.uint32), (2, 21))
    return [(x[:, i : i + 7], positions[:, i : i + 7]) for i in range(0, 21, 7)]


def heads(x):
    return x.reshape(*x.shape[:2], -1, HEAD_DIM)


def plain_layer(weights, state, x, positions):
    q, k, v = (heads(x @ weights[name]) for name in "qkv")
    valid = jnp.ones(x.shape[:2], bool)
    out, state = jaxkv.step(POLICY, SPEC, state, q, k, v, positions, valid)
    return out.reshape(*x.shape[:2], -1) @ weights["o"], state


def outputs(step, state, chunks):
    """The outputs of all chunks. step: (state, x, positions) -> (out, state)."""
    outs = []
    for x, positions in chunks:
        out, state = step(state, x, positions)
        outs.append(out)
    return np.concatenate(outs, axis=1)


def outputs_of_plain_jax(weights, chunks):
    layer = functools.partial(jax.jit(plain_layer), weights)
    return outputs(layer, POLICY.init(SPEC, 2, jax.random.key(0)), chunks)


def test_plain_jax(weights, chunks):
    outs = outputs_of_plain_jax(weights, chunks)
    # No query of the first chunk has lost a token, so its outputs are plain causal attention.
    x, positions = chunks[0]
    q, k, v = (heads(x @ weights[name]) for name in "qkv")
    q, k = (SPEC.encoding.rotate(t, positions) for t in (q, k))
    full = jax.nn.dot_product_attention(q, k, v, scale=SPEC.scale, is_causal=True)
    np.testing.assert_allclose(outs[:, :7], full.reshape(2, 7, -1) @ weights["o"], atol=1e-5)


def test_linen(weights, chunks):
    nn = pytest.importorskip("flax.linen", reason="no flax: pip install -e '.[models]'")

    class Attention(nn.Module):
        """The state is a variable in the collection `cache`, as in linen's own attention."""

        @nn.compact
        def __call__(self, x, positions):
            q, k, v = (
                heads(nn.Dense(size, use_bias=False, name=name)(x)) for name, size in SIZES.items()
            )
            cache = self.variable("cache", "state", POLICY.init, SPEC, 2, jax.random.key(0))
            valid = jnp.ones(x.shape[:2], bool)
            out, state = jaxkv.step(POLICY, SPEC, cache.value, q, k, v, positions, valid)
            if not self.is_initializing():
                cache.value = state
            return nn.Dense(WIDTH, use_bias=False, name="o")(out.reshape(*x.shape[:2], -1))

    layer = Attention()
    cache = jax.jit(layer.init)(jax.random.key(0), *chunks[0])["cache"]
    params = {name: {"kernel": weight} for name, weight in weights.items()}
    apply = jax.jit(functools.partial(layer.apply, mutable=["cache"]))

    def step(cache, x, positions):
        out, changed = apply({"params": params, "cache": cache}, x, positions)
        return out, changed["cache"]

    expected = outputs_of_plain_jax(weights, chunks)
    np.testing.assert_allclose(outputs(step, cache, chunks), expected, atol=1e-5)


def test_equinox(weights, chunks):
    eqx = pytest.importorskip("equinox", reason="no equinox: pip install equinox")

    class Attention(eqx.Module):
        """The state is an argument and a result, as in stateful layers of Equinox."""

        q: eqx.nn.Linear
        k: eqx.nn.Linear
        v: eqx.nn.Linear
        o: eqx.nn.Linear

        def __call__(self, state, x, positions):
            per_token = lambda layer, y: jax.vmap(jax.vmap(layer))(y)
            q, k, v = (heads(per_token(layer, x)) for layer in (self.q, self.k, self.v))
            valid = jnp.ones(x.shape[:2], bool)
            out, state = jaxkv.step(POLICY, SPEC, state, q, k, v, positions, valid)
            return per_token(self.o, out.reshape(*x.shape[:2], -1)), state

    def linear(weight):
        blank = eqx.nn.Linear(*weight.shape, use_bias=False, key=jax.random.key(0))
        return eqx.tree_at(lambda layer: layer.weight, blank, weight.T)

    layer = Attention(**{name: linear(weight) for name, weight in weights.items()})
    state = POLICY.init(SPEC, 2, jax.random.key(0))
    expected = outputs_of_plain_jax(weights, chunks)
    np.testing.assert_allclose(outputs(eqx.filter_jit(layer), state, chunks), expected, atol=1e-5)
