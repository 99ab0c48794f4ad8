"""Mixtures of experts: every form against numpy, quantised experts, MXFP4 files."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv.errors import UserError
from jaxkv.models.loading.source import open_source
from jaxkv.models.network import experts, quantised
from jaxkv.models.network.decoder import layer_weights
from tests.models.folders import write_json, write_model

MODELS = "mixtral", "qwen3_moe", "olmoe", "gpt_oss"
FORMS = experts.by_block, experts.by_pair, experts.by_expert


@pytest.fixture(params=MODELS)
def described(request, tmp_path):
    """The config and the weights of a layer with experts."""
    write_model(tmp_path, request.param)
    source = open_source(tmp_path)
    return source.config, layer_weights(source.weights("float32"), 0)


def numpy_mix(config, weights, x):
    """Every expert of every token, one after another, in float64."""
    weights = {name: np.asarray(w, np.float64) for name, w in weights.items()}
    out = np.zeros(x.shape)
    for at, row in enumerate(x.astype(np.float64)):
        logits = weights["router"] @ row + weights.get("router_bias", 0.0)
        chosen = np.argsort(-logits, kind="stable")[: config.experts_per_token]
        among = logits[chosen] if config.normalised_experts else logits
        for number in chosen:
            share = np.exp(logits[number] - among.max()) / np.exp(among - among.max()).sum()
            out[at] += share * numpy_expert(config, weights, number, row)
    return out


def numpy_expert(config, weights, number, row):
    def project(row, name):
        bias = weights.get(f"expert_{name}_bias")
        return weights[f"expert_{name}"][number] @ row + (0.0 if bias is None else bias[number])

    gate, up = project(row, "gate"), project(row, "up")
    if config.clamp is not None:
        gate, up = np.minimum(gate, config.clamp), np.clip(up, -config.clamp, config.clamp) + 1
    return project(gate / (1 + np.exp(-(1 if config.clamp is None else 1.702) * gate)) * up, "down")


@pytest.mark.parametrize("tokens", [1, 2, 7, 130])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_numpy(form, tokens, described):
    config, weights = described
    x = np.random.default_rng(tokens).standard_normal((tokens, config.width), np.float32)
    chosen, share = experts.route(config, weights, jnp.asarray(x))
    of_experts = {n.removeprefix("expert_"): w for n, w in weights.items() if "expert_" in n}
    actual = jax.jit(form, static_argnums=0)(config, of_experts, jnp.asarray(x), chosen, share)
    expected = numpy_mix(config, weights, x)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_that_all_tokens_choose_and_those_that_none_does(form, tmp_path):
    """Blocks of one expert beyond the largest block, and experts without tokens."""
    write_model(tmp_path, "mixtral")
    source = open_source(tmp_path)
    config, weights = source.config, layer_weights(source.weights("float32"), 0)
    router = np.zeros(weights["router"].shape, np.float32)
    router[2], router[3] = 1.0, 0.5
    weights = weights | {"router": jnp.asarray(router)}
    x = np.abs(np.random.default_rng(0).standard_normal((150, config.width), np.float32))
    chosen, share = experts.route(config, weights, jnp.asarray(x))
    assert np.unique(chosen).tolist() == [2, 3]
    of_experts = {n.removeprefix("expert_"): w for n, w in weights.items() if "expert_" in n}
    actual = jax.jit(form, static_argnums=0)(config, of_experts, jnp.asarray(x), chosen, share)
    np.testing.assert_allclose(actual, numpy_mix(config, weights, x), rtol=0, atol=2e-5)


@pytest.mark.parametrize("weight_format", quantised.FORMATS)
def test_quantised_experts_are_those_of_the_rounded_matrices(weight_format, described):
    config, weights = described
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, config.width), np.float32))
    chosen, share = experts.route(config, weights, x)
    of_experts = {n.removeprefix("expert_"): w for n, w in weights.items() if "expert_" in n}
    rounded = {
        n: quantised.quantise(f"expert_{n}", np.asarray(w), weight_format) if w.ndim == 3 else w
        for n, w in of_experts.items()
    }
    rounded = jax.tree.map(jnp.asarray, rounded)
    floats = {
        n: jax.vmap(quantised.dense)(w) if isinstance(w, quantised.Quantised) else w
        for n, w in rounded.items()
    }
    expected = experts.by_pair(config, floats, x, chosen, share)
    for form in FORMS:
        actual = jax.jit(form, static_argnums=0)(config, rounded, x, chosen, share)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)
    for name, w in of_experts.items():
        if w.ndim == 3:
            step = (w.max(axis=-1) - w.min(axis=-1)) / (254 if weight_format == "int8" else 15)
            assert np.all(np.abs(floats[name] - w) <= 1.02 * np.abs(step)[..., None])


def test_shapes_of_quantised_experts(described):
    for name, w in described[1].items():
        for weight_format in quantised.FORMATS if quantised.is_matrix(name) else ():
            matrix = quantised.quantise(name, np.asarray(w), weight_format)
            shape = quantised.shapes(name, w.shape, weight_format)
            assert jax.tree.map(lambda a: (a.shape, a.dtype.name), matrix) == jax.tree.map(
                lambda a: (a.shape, a.dtype.name), shape
            )


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def write_mxfp4(folder):
    """gpt-oss as it is published: matrices of experts in blocks. Returns their values by name."""
    write_model(folder, "gpt_oss")
    stored, values = load_file(folder / "model.safetensors"), {}
    rng = np.random.default_rng(5)
    for name in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(121, 125, blocks.shape[:3], dtype=np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        table = np.array(FP4 + [-v for v in FP4])
        digits = np.stack([table[blocks & 15], table[blocks >> 4]], axis=-1).reshape(
            *scales.shape, 32
        )
        dense = digits * 2.0 ** (scales[..., None].astype(float) - 127)
        values[name] = dense.reshape(experts, outputs, inputs).transpose(0, 2, 1)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "mxfp4"}
    }
    write_json(folder / "config.json", config)
    return values


def test_mxfp4_equals_its_definition(tmp_path):
    values = write_mxfp4(tmp_path)
    weights = open_source(tmp_path).weights("float32")
    for name, dense in values.items():
        ours = f"layers.{name.split('.')[2]}.expert_"
        if name.endswith("down_proj"):
            np.testing.assert_array_equal(weights[f"{ours}down"], dense.transpose(0, 2, 1))
        else:
            gate, up = dense[..., ::2].transpose(0, 2, 1), dense[..., 1::2].transpose(0, 2, 1)
            np.testing.assert_array_equal(weights[f"{ours}gate"], gate)
            np.testing.assert_array_equal(weights[f"{ours}up"], up)


def test_a_missing_expert_is_named(tmp_path):
    write_model(tmp_path, "mixtral")
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"missing tensor .*experts\.3\.w2"):
        open_source(tmp_path).tensors()


def test_layers_without_experts_have_one_mlp(tmp_path):
    write_model(tmp_path, "qwen3_moe")
    names = open_source(tmp_path).weights("float32")
    assert "layers.0.router" in names and "layers.1.router" not in names
    assert "layers.1.gate" in names and "layers.0.gate" not in names


@pytest.mark.parametrize("damage", ["scales", "type", "blocks"])
def test_damaged_blocks_end_in_one_line(damage, tmp_path):
    write_mxfp4(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    if damage == "scales":
        stored[f"{name}_scales"] = np.ascontiguousarray(stored[f"{name}_scales"][..., :-1])
    elif damage == "type":
        stored[f"{name}_blocks"] = stored[f"{name}_blocks"].astype(np.int32)
    else:
        stored[f"{name}_blocks"] = np.ascontiguousarray(stored[f"{name}_blocks"][..., :8])
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="its scales must be bytes"):
        open_source(tmp_path).tensors()
