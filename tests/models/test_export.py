"""An exported model equals the trained one: in jaxkv, in transformers, and with a cache."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.loading.config import read_config
from jaxkv.models.training import data, training
from jaxkv.models.training.export import export
from jaxkv.models.training.pretrain import setting_of
from jaxkv.rotary import rotary
from tests.models.training_data import small


def exported(tokens, folder, *settings, dtype="float32"):
    """Export initial weights, scaled so that attention matters; returns the setting and weights."""
    setting = setting_of(small("layers=2", *settings), tokens)
    weights = training.init(setting).weights
    weights = {n: 8 * w if w.ndim > 1 else w for n, w in weights.items()}
    for name in weights:
        if name.endswith("sink_logits"):
            weights[name] = jnp.asarray([-1.0, 0.5, 2.0, 0.0])
    tokenizer = tokens.folder / data.TOKENIZER
    export(folder, setting.config, weights, tokenizer, setting.front, dtype)
    return setting, weights


@pytest.mark.parametrize(
    "sinks",
    ["logit", "two_tokens",
     *(sinks for sinks in ("none", "zero", "token"))],
)  # fmt: skip
def test_losses_with_a_cache_equal_those_of_training(tokens, tmp_path, sinks):
    """The loaded model has the losses of training, token by token and in chunks."""
    setting, weights = exported(tokens, tmp_path / "hf", f"sink_variant={sinks}")
    llm = models.load(tmp_path / "hf")
    assert llm.tokenizer.front == setting.front
    runs = data.batch(tokens, "valid", 0, 0, 2, 16)
    losses = jax.jit(training.objective, static_argnums=0)
    _, expected, _ = losses(setting, weights, jnp.asarray(runs))
    _, plain, _ = losses(
        setting_of(small("layers=2"), tokens),
        {name: weights[name] for name in weights if "sink_logits" not in name},
        jnp.asarray(runs),
    )  # fmt: skip
    assert (sinks == "none") == np.allclose(expected, plain, atol=1e-3)
    skip = max(0, len(setting.front) - 1)  # the second sink token is not predicted
    for run, loss in zip(runs.tolist(), np.asarray(expected), strict=True):
        ids = [*setting.front, *run[len(setting.front) :]]
        for policy, chunk in (("full", 5), ("streaming:sinks=2,window=20", 1)):
            actual = np.concatenate(list(models.losses(llm, ids, policy, chunk)))
            np.testing.assert_allclose(actual[skip:], loss[skip:], atol=2e-5)


@pytest.mark.parity
@pytest.mark.parametrize("sinks", ["none", "token"])
def test_transformers_gives_the_same_logits(tokens, tmp_path, sinks):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    setting, weights = exported(tokens, tmp_path / "hf", f"sink_variant={sinks}")
    text = "the cat sat on a mat and saw"
    reference_ids = AutoTokenizer.from_pretrained(tmp_path / "hf")(text).input_ids
    ids = models.load(tmp_path / "hf").tokenizer.encode(text)
    assert reference_ids == ids and ids[: len(setting.front)] == list(setting.front)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32").eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    decoder, hidden, _ = training.uncached.forward(setting.config, weights, jnp.asarray([ids]))
    np.testing.assert_allclose(decoder.logits(hidden)[0], expected, atol=1e-4)


@pytest.mark.parametrize("sinks", ["none", "zero", "logit", "token"])
def test_the_config_survives_export(tokens, tmp_path, sinks):
    setting, weights = exported(tokens, tmp_path / "hf", f"sink_variant={sinks}")
    assert read_config(tmp_path / "hf") == setting.config
    named = json.loads((tmp_path / "hf" / "config.json").read_text("utf-8"))
    sink = sinks in ("zero", "logit")
    # Other libraries must not load a model with sink logits as if it had none.
    assert named["architectures"] == ["SinkLlamaForCausalLM" if sink else "LlamaForCausalLM"]
    assert (named["model_type"] == "llama") == (not sink)
    loaded = models.load(tmp_path / "hf").weights
    assert jax.tree.all(jax.tree.map(np.array_equal, dict(weights), dict(loaded)))


def test_half_precision_halves_the_file(tokens, tmp_path):
    full, half = tmp_path / "whole", tmp_path / "half"
    exported(tokens, full)
    exported(tokens, half, dtype="bfloat16")
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (full, half)]
    assert sizes[1] < 0.52 * sizes[0]
    assert read_config(half).dtype == "bfloat16"


@pytest.mark.parametrize(
    "changes",
    [{"encoding": rotary(8, 5e5)}, {"windows": (4,)}, {"qk_norm": True}, {"family": "qwen3"}],
)
def test_settings_that_the_config_cannot_store_are_refused(tokens, tmp_path, changes):
    setting = setting_of(small(), tokens)
    config = dataclasses.replace(setting.config, **changes)
    weights = training.init(setting).weights
    with pytest.raises(
        UserError, match=f"only Llamas .* got another {next(iter(changes))}; keep the"
    ):
        export(tmp_path / "hf", config, weights, tokens.folder / data.TOKENIZER)
    assert not (tmp_path / "hf").exists()


def test_the_bos_of_the_tokenizer_is_removed(tokens, tmp_path):
    """A model without sinks is trained without a BOS, so its tokenizer must not add one."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    coder = Tokenizer.from_file(str(tokens.folder / data.TOKENIZER))
    coder.post_processor = TemplateProcessing("<|sink|> $A", special_tokens=[("<|sink|>", 1)])
    coder.save(str(tmp_path / "tokenizer.json"))
    setting = setting_of(small(), tokens)
    weights = training.init(setting).weights
    export(tmp_path / "hf", setting.config, weights, tmp_path / "tokenizer.json", ())
    assert models.load(tmp_path / "hf").tokenizer.front == ()


def test_an_unknown_sink_logit_is_refused(tokens, tmp_path):
    exported(tokens, tmp_path / "hf", "sink_variant=zero")
    path = tmp_path / "hf" / "config.json"
    path.write_text(path.read_text("utf-8").replace('"zero"', '"two"'), "utf-8")
    with pytest.raises(UserError, match="sink_logit must be one of none, zero, learned, got 'two'"):
        models.load(tmp_path / "hf")
