"""Models that read pictures too: their text part equals transformers' model on a text prompt."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.config import read_config
from tests.models.folders import OTHERS, write_json
from tests.models.test_parity import FULL, LIMIT, prefill, untokenized
from tests.tiny import write_tiny

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
TEXT = {"gemma3": "gemma3", "mistral3": "ministral3"}


def write_tower(folder, name):
    """A random model of transformers, as it saves it; returns the model."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {k: v for k, v in OTHERS[TEXT[name]].items() if k not in ("architectures", "dtype")}
    vision = VISION | {"model_type": {"gemma3": "siglip_vision_model", "mistral3": "pixtral"}[name]}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parity
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", TEXT)
def test_the_text_part_equals_transformers(name, older, tmp_path):
    import torch

    model = write_tower(tmp_path, name)
    if older:  # the names of files before transformers 4.52
        path = tmp_path / "model.safetensors"
        stored = {n.replace("model.language_model.", "language_model.model."): w
                  for n, w in load_file(path).items()}  # fmt: skip
        save_file(stored, path)
    ids = np.random.default_rng(2).integers(3, 250, 100).tolist()
    llm = untokenized(tmp_path)
    (actual,) = prefill(Stream(llm, FULL), [ids])
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(actual - expected).max() < LIMIT * max(1, np.abs(expected).max())


def test_a_text_part_of_another_kind_is_refused(tmp_path):
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    for text, said in (({"model_type": "llama"}, "got 'llama'"), (None, "got None")):
        write_json(tmp_path / "config.json", fields | {"text_config": text})
        with pytest.raises(UserError, match=f"must be of model_type gemma3_text, {said}"):
            read_config(tmp_path)
    write_json(tmp_path / "config.json", {"architectures": ["Llama4ForConditionalGeneration"]})
    with pytest.raises(UserError, match="unsupported architecture Llama4ForConditionalGeneration"):
        read_config(tmp_path)


def test_the_published_config_of_gemma_3_names_few_fields(tmp_path):
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024}  # fmt: skip
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
              "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "text_config": text}  # fmt: skip
    write_json(tmp_path / "config.json", fields)
    config = read_config(tmp_path)
    assert (config.vocab, config.heads, config.kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.context, config.eos, config.dtype) == (131072, (1, 106), "bfloat16")
    assert config.windows[4:6] == (1024, None) and config.encodings[4] != config.encodings[5]


def test_pictures_are_refused_and_towers_only_of_multimodal_models(tmp_path):
    write_tiny(tmp_path, config=OTHERS["gemma3"], vocab_size=258, bos_token_id=0, eos_token_id=1)
    text = json.loads((tmp_path / "config.json").read_text())
    path = tmp_path / "model.safetensors"
    tower = load_file(path) | {"vision_tower.a": np.zeros(2, np.float32)}
    save_file(tower, path)
    with pytest.raises(UserError, match=r"extra tensor vision_tower\.a"):
        models.load(tmp_path)
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "image_token_index": 7}
    write_json(tmp_path / "config.json", outer | {"text_config": text})
    llm = models.load(tmp_path)
    with pytest.raises(UserError, match="a picture cannot be read, got its token id 7"):
        models.score(llm, [0, 5, 7, 9], "full")
