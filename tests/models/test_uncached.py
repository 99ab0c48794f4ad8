"""Attention over whole samples equals numpy; its gradients equal those of JAX."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.contract import Spec
from jaxkv.errors import UserError
from jaxkv.models.network import uncached
from jaxkv.rotary import NoPosition, rotary

HEADS, KV_HEADS, DIM = 4, 2, 8
SPEC = Spec(KV_HEADS, DIM, DIM**-0.5, rotary(DIM, 100.0))


def random_tokens(rng, tokens, rows=2, dim=DIM, dtype="float32"):
    shapes = ((rows, tokens, HEADS, dim), *((rows, tokens, KV_HEADS, dim),) * 2)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def oracle(q, k, v, scale, window=None, softcap=None, sink_logits=None):
    """Softmax attention by its definition, in float64 and without positions."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out, seen = np.zeros(q.shape), np.zeros((q.shape[0], HEADS, q.shape[1], q.shape[1]))
    for b, t, n in np.ndindex(*q.shape[:3]):
        first = 0 if window is None else max(0, t + 1 - window)
        logits = k[b, first : t + 1, n // (HEADS // KV_HEADS)] @ q[b, t, n] * scale
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        weights = np.exp(logits)
        weights /= weights.sum() + (0 if sink_logits is None else np.exp(sink_logits[n]))
        out[b, t, n] = weights @ v[b, first : t + 1, n // (HEADS // KV_HEADS)]
        seen[b, n, t, first : t + 1] = weights
    return out, seen


CASES = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 1.5},
    "zero sink": {"sink_logits": np.zeros(HEADS, np.float32)},
    "learned sinks": {"sink_logits": np.array([-2, 0.5, 1, 3], np.float32)},
}


# Blocks have 128 queries. The sizes are around one block and above two.
SIZES = [(case, 300) for case in CASES] + [("learned sinks", n) for n in (1, 127, 128, 129)]


@pytest.mark.parametrize("case, tokens", SIZES)
def test_attention_equals_numpy(rng, case, tokens):
    how = dict(CASES[case])
    q, k, v = random_tokens(rng, tokens, rows=1)
    expected, seen = oracle(q, k, v, SPEC.scale, **how)
    window, sink_logits = how.get("window"), how.get("sink_logits")
    spec = dataclasses.replace(SPEC, encoding=NoPosition(), softcap=how.get("softcap"))
    out = jax.jit(lambda *a: uncached.attend(window, spec, *a, sink_logits=sink_logits)[0])(q, k, v)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    out, probabilities = jax.jit(
        lambda *a: uncached.attend_with_probabilities(window, spec, *a, sink_logits=sink_logits)
    )(q, k, v)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(probabilities, seen, atol=2e-6)


def gradients(attend, *arrays):
    value = lambda *a: jnp.sum(jnp.sin(attend(*a)))
    return jax.jit(jax.grad(value, tuple(range(len(arrays)))))(*arrays)


@pytest.mark.parametrize("case, tokens", SIZES)
def test_gradients_equal_those_of_jax(rng, case, tokens):
    """`attend` has hand-written gradients, `attend_with_probabilities` those of JAX."""
    how = CASES[case]
    spec = dataclasses.replace(SPEC, softcap=how.get("softcap"))
    arrays = random_tokens(rng, tokens)
    if "sink_logits" in how:
        arrays += (jnp.asarray(how["sink_logits"]),)

    def gradients_of(function):
        return gradients(
            lambda q, k, v, sink_logits=None: function(
                how.get("window"), spec, q, k, v, sink_logits
            )[0],
            *arrays,
        )

    for actual, expected in zip(
        gradients_of(uncached.attend), gradients_of(uncached.attend_with_probabilities), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", ["plain", "window", "zero sink", "learned sinks"])
def test_a_fused_kernel_supports_sinks(rng, case):
    """The function that calls cuDNN, here with the kernel of XLA."""
    sink_logits, window = CASES[case].get("sink_logits"), CASES[case].get("window")
    arrays = random_tokens(rng, 37)
    if case == "learned sinks":  # a sink that is constant zero is a numpy array
        arrays += (jnp.asarray(sink_logits),)

    def fused(q, k, v, sink_logits=sink_logits):
        return uncached.fused_attention(q, k, v, SPEC.scale, window, sink_logits, "xla")

    def plain(q, k, v, sink_logits=sink_logits):
        spec = dataclasses.replace(SPEC, encoding=NoPosition())
        return uncached.attend(window, spec, q, k, v, sink_logits)[0]

    np.testing.assert_allclose(fused(*arrays), plain(*arrays), atol=2e-6)
    for actual, expected in zip(gradients(fused, *arrays), gradients(plain, *arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)


def test_a_learned_sink_survives_half_precision():
    """Three bfloat16 terms store a logit in 24 bits; one would have an error of up to 0.4 %."""
    sink_logits = jnp.array([-3.3, 0.123456, 1.7, 9.9], jnp.float32)
    terms = uncached._split(sink_logits, jnp.bfloat16)
    assert terms.shape == (4, 8) and terms.dtype == jnp.bfloat16
    np.testing.assert_allclose(terms.astype(jnp.float32).sum(-1), sink_logits, rtol=1e-6)


@pytest.mark.skipif(
    all(device.platform != "gpu" for device in jax.devices()), reason="no NVIDIA GPU"
)
@pytest.mark.parametrize("tokens", [128, 300, 2048])
@pytest.mark.parametrize("case", ["plain", "window", "zero sink", "learned sinks"])
def test_cudnn_equals_xla(rng, case, tokens):
    """Values with those of bfloat16, gradients with those of float32."""
    window, zero = CASES[case].get("window") and 100, CASES[case].get("sink_logits")
    arrays = random_tokens(rng, tokens, dim=64, dtype="bfloat16")
    if case == "learned sinks":
        arrays += (jnp.asarray(zero),)
    spec = Spec(KV_HEADS, 64, 64**-0.5, rotary(64, 100.0), dtype="bfloat16")

    def attend(implementation):
        return lambda q, k, v, sink_logits=zero: uncached.attend(
            window, spec, q, k, v, sink_logits, implementation=implementation
        )[0].astype(jnp.float32)

    values = [jax.jit(attend(name))(*arrays) for name in ("cudnn", "xla")]
    np.testing.assert_allclose(*values, atol=0.03)
    exact = gradients(attend("xla"), *(a.astype(jnp.float32) for a in arrays))
    for actual, expected in zip(gradients(attend("cudnn"), *arrays), exact, strict=True):
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(actual.astype(jnp.float32), expected, atol=0.03 * scale)


class Gpu:
    """A stand-in for a JAX device, with the two fields that the check for cuDNN reads."""

    def __init__(self, capability, version="cuda 12080", platform="gpu"):
        self.platform, self.compute_capability = platform, capability
        self.client = type("Client", (), {"platform_version": version})


ZERO, LEARNED = np.zeros(4, np.float32), np.ones(4, np.float32)
FITS = {
    "H200": (Gpu("9.0"), 64, {}, ""),
    "H200, wide heads": (Gpu("9.0"), 256, {}, ""),
    "A100": (Gpu("8.0"), 128, {"window": 64}, ""),
    "A100, wide heads": (Gpu("8.0"), 256, {}, "up to 128"),
    "A100, zero sink": (Gpu("8.0"), 128, {"sink_logits": ZERO}, ""),
    "A100, learned sinks": (Gpu("8.0"), 128, {"sink_logits": LEARNED}, "got 136"),
    "T4": (Gpu("7.5"), 64, {}, "8.0 on, got 7.5"),
    "AMD": (Gpu("gfx942", "rocm 6.3"), 64, {}, "NVIDIA"),
    "CPU": (Gpu("", "cpu", "cpu"), 64, {}, "got cpu"),
    "odd heads": (Gpu("9.0"), 12, {}, "of eights"),
    "softcap": (Gpu("9.0"), 64, {"softcap": 30.0}, "without a softcap"),
    "sink and window": (Gpu("9.0"), 64, {"sink_logits": ZERO, "window": 8}, "without a window"),
}


@pytest.mark.parametrize("case", FITS)
def test_which_devices_support_cudnn(case):
    device, head_dim, how, message = FITS[case]
    q = jax.ShapeDtypeStruct((1, 8, 4, head_dim), jnp.bfloat16)
    lacks = uncached.cudnn_lacks(device, q, **how)
    assert message in lacks and bool(lacks) == bool(message)
    wide = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    assert uncached.cudnn_lacks(device, wide, **how)


def test_cudnn_by_name_is_refused_on_a_cpu(rng):
    q, k, v = random_tokens(rng, 4)
    with pytest.raises(UserError, match="cudnn attends on an NVIDIA GPU, got cpu; use"):
        uncached.attend(None, SPEC, q, k, v, implementation="cudnn")


def test_attention_on_the_first_token_is_that_of_an_independent_program(stories):
    reported = json.loads((stories / "perplexity.json").read_text("utf-8"))
    llm = models.load(stories)
    ids = jnp.asarray([reported["first4096_ids"][:512]], jnp.int32)
    actual = uncached.mass_on_first(llm.config, llm.weights, ids, 64).mean(1)
    expected = reported["first_token_attention"]["per_layer_mean"]
    np.testing.assert_allclose(actual, expected, rtol=1e-3)
