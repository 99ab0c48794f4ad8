"""A loaded model as a folder that transformers reads, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxkv.errors import UserError
from jaxkv.models.loading.gguf import read_header
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.weight_names import shapes
from jaxkv.models.training.export import described


def as_folder(llm: Llm, folder: Path) -> Path:
    """The folder of a model, or for a GGUF file a new one with its dequantised weights.

    No tokenizer is written: both sides get token ids. Raises UserError for a model that is not a
    plain Llama in float32.
    """
    if llm.dtype != "float32":
        raise UserError(
            f"weights are compared in float32, got {llm.dtype}; load with dtype float32"
        )
    if llm.path.is_dir():
        return llm.path
    theta = read_header(llm.path).get("llama.rope.freq_base", float, 10000.0)
    tensors = {
        hf_name: np.asarray(llm.weights[name]) for name, (hf_name, _) in shapes(llm.config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described(llm.config, "float32", theta)))
    return folder


def add_chat(llm: Llm, folder: Path) -> None:
    """Add to a folder of `as_folder` what a server reads: tokenizer, chat template and settings.

    The settings are greedy and name no EOS, so no token ends an answer of transformers' server.
    """
    named = dict(llm.chat.tokens)
    llm.tokenizer.backend.save(str(folder / "tokenizer.json"))
    descriptions = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named,
                                  "chat_template": llm.chat.template},
        "generation_config.json": {"do_sample": False},
    }  # fmt: skip
    for name, fields in descriptions.items():
        (folder / name).write_text(json.dumps(fields))
