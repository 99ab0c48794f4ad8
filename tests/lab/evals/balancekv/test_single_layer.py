"""The error of a compressed cache: recorded keys are the layer's, and more rounds err more."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv import models
from jaxkv.contract import Spec
from jaxkv.evals.balancekv import single_layer
from jaxkv.evals.lib.text import tokens_of
from jaxkv.evals.magicpig import heads
from jaxkv.policy_spec import parse_policy
from jaxkv.rotary import rotary
from tests.core import oracle

SPEC = Spec(kv_heads=2, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0), group=2)
TOKENS = 2 * single_layer.ENDS + 2 * single_layer.BLOCK


@pytest.fixture(scope="module")
def drawn():
    """q, k, v of a prompt and the queries after it: an autoregression, so neighbours are close."""
    random = np.random.default_rng(0)
    noise = random.normal(size=(3, TOKENS + single_layer.QUERIES, 4, 8))
    for i in range(1, noise.shape[1]):
        noise[1:, i] = 0.9 * noise[1:, i - 1] + np.sqrt(1 - 0.9**2) * noise[1:, i]
    q, k, v = noise.astype(np.float32)
    return q, k[:, :2], v[:, :2]


def test_without_compression_the_output_is_causal_attention(drawn):
    """Of each query to the tokens before it, by position."""
    q, k, v = drawn
    actual = single_layer.attend(SPEC, q, k, v, parse_policy("full"))
    at = np.arange(len(q))
    keys, values = (
        np.repeat(oracle.rotate_heads(k, at, 100.0), 2, axis=1),
        np.repeat(v, 2, axis=1).astype(np.float64),
    )
    logits = (
        np.einsum("tnh,snh->tns", oracle.rotate_heads(q, at, 100.0)[TOKENS:], keys) * SPEC.scale
    )
    logits = np.where(at[TOKENS:, None, None] >= at, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    attend = lambda w: np.einsum("tns,snh->tnh", w / w.sum(axis=2, keepdims=True), values)
    np.testing.assert_allclose(actual, attend(weights), atol=2e-6)
    roomy = parse_policy(f"snapkv:capacity={TOKENS},window=32")
    np.testing.assert_allclose(
        single_layer.attend(SPEC, q, k, v, roomy), attend(weights), atol=2e-6
    )
    weights[:, :, single_layer.ENDS : TOKENS - single_layer.ENDS] = 0
    ends = single_layer.attend(SPEC, q, k, v, parse_policy("full"), between=False)
    np.testing.assert_allclose(ends, attend(weights), atol=2e-6)


def test_more_rounds_err_more_and_weights_help(drawn):
    errors = single_layer.errors(SPEC, *drawn, rounds=[1, 3], seeds=[0, 1, 2], title="test")
    assert set(errors) == {*single_layer.METHODS, "saturated", "ends alone", "snapkv"}
    for name in set(errors) - {"saturated", "ends alone"}:
        assert np.mean(errors[name]["1"]) < np.mean(errors[name]["3"]), name
        assert 0 < np.mean(errors[name]["1"]) < errors["ends alone"]["1"][0] < 3, name
    mean = {name: np.mean(errors[name]["3"]) for name in single_layer.METHODS}
    assert mean["uniform, weighted"] < mean["uniform"]
    assert mean["stratified"] < mean["uniform, weighted"]
    assert len(set(errors["uniform"]["1"])) == 3  # every seed has its own draw
    assert all(0 <= share <= 1 for share in errors["saturated"].values())
    shown = single_layer.summary({"0": errors, "1": errors}, [1, 3])
    assert shown["uniform"]["3"]["median"] == np.median(errors["uniform"]["3"])
    stretches = single_layer.by_stretch([{"0": errors, "1": errors}] * 2, [1, 3])
    assert "saturated" not in stretches
    np.testing.assert_allclose(stretches["uniform"]["3"], [np.mean(errors["uniform"]["3"])] * 2)


@pytest.mark.parametrize("length", [300, 700])  # within the context of 512, and beyond it
def test_captured_keys_and_values_are_those_of_the_first_layer(shared, length):
    """They depend on the embeddings only, so plain numpy computes them."""
    llm = models.load(shared / "models" / "stories260K", "float32")
    ids, _ = tokens_of(llm, shared / "text" / "tinystories" / "valid.txt", length)
    weights = {name: np.asarray(w, np.float64) for name, w in llm.weights.items()}
    x = weights["embed"][ids]
    x *= weights["layers.0.attn_norm"] / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
    seen = heads.capture(llm, ids)
    assert len(seen) == llm.config.layers
    for captured, name in zip(seen[0], "qkv", strict=True):
        expected = (x @ weights[f"layers.0.{name}"].T).reshape(length, -1, llm.config.head_dim)
        np.testing.assert_allclose(captured, expected, atol=1e-4)
