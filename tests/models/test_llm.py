"""Loading a whole model, and one clear error for each fault of a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv.cli import main
from jaxkv.errors import UserError
from jaxkv.models.loading.llm import without_weights
from jaxkv.models.loading.source import open_source
from jaxkv.models.network import device
from tests.models.folders import OTHERS, deny
from tests.models.gguf.files import hf_model, write_gguf
from tests.models.test_uncached import Gpu
from tests.tiny import write_tiny


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


@pytest.mark.parametrize(
    "capability, published, expected",
    [
        ("7.5", "bfloat16", "float16"),
        ("7.5", "float32", "float32"),
        ("8.0", "bfloat16", "bfloat16"),
    ],
)  # fmt: skip
def test_the_dtype_of_a_gpu(capability, published, expected, tmp_path, monkeypatch):
    """A T4 has float16 units only."""
    folder = write_tiny(tmp_path, num_hidden_layers=1, torch_dtype=published)
    monkeypatch.setattr(device.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(device.jax, "local_devices", lambda: [Gpu(capability)])
    assert without_weights(open_source(folder)).dtype == expected
    gemma = OTHERS["gemma2"] | {"torch_dtype": published, "vocab_size": 258}
    gemma = write_tiny(tmp_path / "gemma", config=gemma)
    overflows = expected == "float16"  # so do the hidden states of Gemma
    dtype = without_weights(open_source(gemma)).dtype
    assert dtype == ("float32" if overflows else expected)


def test_an_accelerator_that_reads_prompts_by_plain_attention_says_why(
    tmp_path, monkeypatch, capsys
):
    folder = write_tiny(tmp_path, num_hidden_layers=1, torch_dtype="bfloat16")
    without_weights(open_source(folder))
    assert not capsys.readouterr().err, "a CPU has no other attention"
    monkeypatch.setattr(device.jax, "default_backend", lambda: "tpu")
    without_weights(open_source(folder))
    said = capsys.readouterr().err
    assert said == (
        "jaxkv: prompts are read by XLA's attention, which is slower: the head dim is 8, not 64, "
        "128, 256\n"
    )


def test_an_unknown_dtype(tiny_folder):
    with pytest.raises(UserError, match="dtype must be one of float32, bfloat16, float16, got 'f"):
        models.load(tiny_folder, dtype="fp8")


FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json", "chat_template.jinja")  # fmt: skip


def check(path: Path, model: Path, capsys) -> None:
    """Loading the model names the file."""
    message = f"cannot read {path}: Permission denied; check that it is a file that you may read"
    with pytest.raises(UserError) as error:
        models.load(model)
    assert str(error.value) == message
    assert main(["generate", "Hi", "--model", str(model)]) == 2
    assert capsys.readouterr().err == f"jaxkv: error: {message}\n"


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_folder(name, tmp_path, monkeypatch, capsys):
    path = write_tiny(tmp_path / "tiny") / name
    path.exists() or path.write_text("{}")
    deny(monkeypatch, path)
    check(path, path.parent, capsys)


@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_a_gguf_file(name, tmp_path, monkeypatch, capsys):
    path = write_gguf(tmp_path / name, *hf_model(tmp_path, "llama2"))
    deny(monkeypatch, path)
    check(path, path, capsys)
