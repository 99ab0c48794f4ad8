"""Loading a whole model, and one clear error for each fault of a folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.sampling import Sampling
from tests.models.folders import write_json
from tests.tiny import write_tiny


@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def test_the_fields_of_a_loaded_model(tiny, tiny_folder):
    assert tiny.path == tiny_folder and tiny.mesh is None
    assert tiny.name == tiny_folder.name and tiny.files == (tiny_folder / "model.safetensors",)
    assert tiny.eos == (1, 7), "ids of the config, then of the tokenizer, without repeats"
    assert tiny.tokenizer.decode(tiny.tokenizer.encode("Hello, 東京")) == "Hello, 東京"
    assert tiny.spec == jaxkv.Spec(
        kv_heads=4, head_dim=4, scale=0.5, encoding=tiny.config.encoding, dtype="float32", group=2
    )
    assert tiny.policies("window:window=3") == (jaxkv.Window(3),) * 2
    assert tiny.policies("0=full;1=window") == (jaxkv.Full(), jaxkv.Window())


def test_the_fingerprint_tells_weights_and_sinks_apart(tiny, tiny_folder):
    assert models.load(tiny_folder).fingerprint() == tiny.fingerprint()
    sinks = replace(tiny, tokenizer=replace(tiny.tokenizer, front=(5, 0), sinks=(5,)))
    assert sinks.fingerprint() != tiny.fingerprint()


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_the_fingerprint_depends_on_every_row(weights, tiny_folder):
    """A model with one trained row must not take the caches of the model without it."""
    llm = models.load(tiny_folder, weights=weights)
    for name, weight in llm.weights.items():
        leaves, tree = jax.tree.flatten(weight)
        for n, leaf in enumerate(leaves):
            last = leaf.at[-1].set(leaf[-1] + 1)
            changed = jax.tree.unflatten(tree, [*leaves[:n], last, *leaves[n + 1 :]])
            changed_llm = replace(llm, weights={**llm.weights, name: changed})
            assert changed_llm.fingerprint() != llm.fingerprint(), (name, n, leaf.shape)


def test_the_nnx_module_has_the_weights_of_the_model(tiny):
    """`decoder` is an nnx module over the same weights, for users with their own decode loop."""
    from flax import nnx

    ids = np.array([[0, 65, 66, 67]], np.int32)
    policies = tiny.policies("full:start=8")
    states = [p.init(tiny.spec, 1, jax.random.key(0)) for p in policies]
    positions, valid = jnp.arange(4, dtype=jnp.uint32)[None], jnp.ones((1, 4), bool)

    @jax.jit
    def own_loop(ids, states):
        decoder = tiny.decoder
        hidden, states = decoder(ids, positions, valid, policies, states)
        return decoder.logits(hidden)[0, -1], states

    logits, states = own_loop(ids, states)
    stream = models.Stream(tiny, "full:start=8")
    stream.prefill([ids[0].tolist()], 16)
    np.testing.assert_allclose(logits, stream.decoding.logits[0], atol=1e-5)
    assert int(states[1].count[0]) == 4
    leaves = jax.tree.leaves(nnx.state(tiny.decoder, nnx.Param))
    assert len(leaves) == len(tiny.weights)
    assert sum(leaf.size for leaf in leaves) == sum(w.size for w in tiny.weights.values())


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
def test_dtype(published, tmp_path, monkeypatch):
    folder = write_tiny(tmp_path, num_hidden_layers=1, torch_dtype=published)

    def dtypes(**options):
        llm = models.load(folder, **options)
        return llm.dtype, {str(w.dtype) for w in llm.weights.values()}, llm.spec.dtype

    # The default is float32 on a CPU, where bfloat16 products are ten times slower.
    assert dtypes() == ("float32", {"float32"}, "float32")
    for requested in ("float32", "bfloat16", "float16"):
        short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[requested]
        for spelling in (requested, short, getattr(jnp, requested), jnp.dtype(requested)):
            assert dtypes(dtype=spelling) == (requested, {requested}, requested)
    monkeypatch.setattr("jaxkv.models.loading.llm.jax.default_backend", lambda: "tpu")
    assert dtypes() == (published, {published}, published)


def test_progress(tiny_folder):
    seen: list[tuple[int, int]] = []
    llm = models.load(tiny_folder, dtype="float32", progress=lambda *step: seen.append(step))
    total = sum(w.nbytes for w in llm.weights.values())
    assert seen == sorted(seen) and seen[-1] == (total, total) and len(seen) > 3


def test_a_folder_may_be_a_string(tiny, tiny_folder):
    llm = models.load(str(tiny_folder))
    assert llm.path == tiny.path and llm.config == tiny.config


def corrupt_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without(name: str):
    return lambda folder: (folder / name).unlink()


def config(**fields):
    def change(folder: Path) -> None:
        where = folder / "config.json"
        write_json(where, json.loads(where.read_text(encoding="utf-8")) | fields)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "no such folder"),
        (without("config.json"), "no config.json in"),
        (without("model.safetensors"), "no .*safetensors"),
        (without("tokenizer.json"), "no tokenizer in"),
        (corrupt_weights, "model.safetensors"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json is corrupt"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "tokenizer_config.json").write_bytes(b"\xff{}"), "tokenizer_config.json"),
        (config(architectures=["GPT2LMHeadModel"], model_type="gpt2"), "LlamaForCausalLM"),
        (config(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic.*linear"),
        (config(intermediate_size=50), r"\(?\[?48.*50|50.*48"),
        (config(num_hidden_layers=3), r"layers\.2"),
        (config(num_hidden_layers=1), r"layers\.1"),
    ],
)
def test_damaged_folders_are_refused_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        models.load(folder)
    assert "\n" not in str(error.value), "one line"


def test_an_unknown_dtype(tiny_folder):
    with pytest.raises(UserError, match="dtype must be one of float32, bfloat16, float16, got 'f"):
        models.load(tiny_folder, dtype="fp8")


def test_weights_may_be_replaced(tiny):
    """An Llm is data: two output heads can share its other weights."""
    negated = replace(tiny, weights=tiny.weights | {"head": -tiny.weights["head"]})
    streams = [models.Stream(llm, "window:window=8") for llm in (tiny, negated)]
    for stream in streams:
        stream.prefill([[65, 66, 67]])
    logits, opposite = (np.asarray(stream.decoding.logits) for stream in streams)
    np.testing.assert_allclose(logits, -opposite, atol=1e-6)
    assert streams[0].decode(Sampling(), 1, ())[0][0, 0] == logits.argmax() == (-opposite).argmax()
    assert jnp.dtype(logits.dtype) == jnp.float32
