"""Writes a complete small model folder: random weights, a byte tokenizer, greedy by default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors

from jaxkv.models.loading import sinks
from jaxkv.models.loading.source import open_source
from tests.models.folders import SIZES, write_json, write_model

BEGIN, END = "<|begin|>", "<|end|>"  # ids 0 and 1
CONFIG = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def write_tiny(
    folder: Path, seed: int = 0, config: Mapping[str, Any] = CONFIG, **fields: Any
) -> Path:
    """Write the model to `folder` and return it; fields: overrides of config.json."""
    write_model(folder, config | fields, seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate([BEGIN, END, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{BEGIN} $A", special_tokens=[(BEGIN, ids[BEGIN])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": BEGIN, "eos_token": END})
    write_json(folder / "generation_config.json", {"do_sample": False})
    return folder


def write_sink_tokens(path: Path, folder: Path | str, count: int) -> Path:
    """Write random sink tokens for the model in a folder, as `jaxkv pretrain --from` does."""
    source = open_source(folder)
    rows = np.random.default_rng(0).normal(size=(count, source.config.width))
    fingerprint = source.fingerprint()
    return sinks.write(path, {sinks.SINK_TOKENS: rows}, source.config.layers, fingerprint)
