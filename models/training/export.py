"""A trained model as a Hugging Face folder: `models.load` reads it, and transformers does.

A model with sink logits has its own architecture name, so that no other library loads it without
them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from jaxkv import files
from jaxkv.errors import UserError
from jaxkv.models.loading.config import SINK_LLAMA, THETA
from jaxkv.models.loading.weight_names import shapes
from jaxkv.models.network.config import Config
from jaxkv.rotary import rotary


def export(
    folder: Path,
    config: Config,
    weights: Mapping[str, Any],
    tokenizer: Path | Tokenizer,
    front: Sequence[int] = (),
    dtype: str = "float32",
    fields: Mapping[str, Any] | None = None,
    tokenizer_fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder completely or not at all; returns it.

    weights: arrays by our names. tokenizer: the one that the model was trained with, or its
    tokenizer.json. front: sink tokens, which the written tokenizer then puts before every text.
    fields: config.json in place of `described`. tokenizer_fields: more of tokenizer_config.json.
    Raises UserError for a model that config.json would not describe (`described`).
    """
    stored = jnp.dtype(dtype)
    ids = {"bos_token_id": config.bos, "eos_token_id": list(config.eos)}
    description = (described(config, dtype) if fields is None else dict(fields)) | ids
    tensors = {
        hf_name: np.asarray(weights[name]).astype(stored)
        for name, (hf_name, _) in shapes(config).items()
    }
    coder = Tokenizer.from_file(str(tokenizer)) if isinstance(tokenizer, Path) else tokenizer
    tokens = [coder.id_to_token(i) for i in front]
    # Also without sink tokens: a tokenizer from elsewhere may put a BOS before a text.
    special = list(zip(tokens, front, strict=True))
    coder.post_processor = TemplateProcessing(" ".join([*tokens, "$A"]), special_tokens=special)
    begin = {"bos_token": tokens[0]} if tokens else {}
    descriptions = {
        "config.json": description,
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **({"eos_token": coder.id_to_token(config.eos[0])} if config.eos else {}),
            "model_max_length": config.context,
            "clean_up_tokenization_spaces": False,
            **begin,
            **(tokenizer_fields or {}),
        },
    }
    contents = {
        name: (json.dumps(value, indent=1) + "\n").encode() for name, value in descriptions.items()
    }
    contents["tokenizer.json"] = coder.to_str(pretty=True).encode()
    contents["model.safetensors"] = save(tensors, metadata={"format": "pt"})
    folder.mkdir(parents=True, exist_ok=True)
    files.write({folder / name: content for name, content in contents.items()})
    return folder


def described(config: Config, dtype: str, theta: float = THETA) -> dict[str, Any]:
    """config.json of a Llama without biases or scaled positions, in the dialect all versions read.

    theta: the base of its rotary frequencies. `models.load` reads it back as the same Config.
    Raises UserError for any other model.
    """
    plain = dataclasses.replace(
        config,
        family="llama",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm="none",
        windows=(None,) * config.layers,
        encoding=rotary(config.head_dim, theta),
    )
    differing = [
        f.name
        for f in dataclasses.fields(Config)
        if getattr(config, f.name) != getattr(plain, f.name)
    ]
    if differing:
        raise UserError(
            f"only Llamas without biases, windows and scaled positions are exported, got another "
            f"{', '.join(differing)}; keep the folder that it was loaded from"
        )
    sinks = {} if config.sink_logit == "none" else {"sink_logit": config.sink_logit}
    return {
        "architectures": [SINK_LLAMA if sinks else "LlamaForCausalLM"],
        "model_type": "sink_llama" if sinks else "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.context,
        "rope_theta": theta,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        **sinks,
    }
