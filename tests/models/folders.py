"""Small random models of every family, in the published formats."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxkv.models.loading.config import read_config
from jaxkv.models.loading.weight_names import stored_shapes

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}


def deny(monkeypatch, path: Path) -> None:
    """Refuse to open a file, as one of another user is; root may open any."""
    for module in (builtins, io):
        opens = module.open

        def denied(file, *args, opens=opens, **options):
            if not isinstance(file, int) and Path(os.fsdecode(file)) == path:
                raise PermissionError(errno.EACCES, "Permission denied", str(file))
            return opens(file, *args, **options)

        monkeypatch.setattr(module, "open", denied)


def _config(name: str, **fields: Any) -> dict[str, Any]:
    """A config.json of the family `name`, in the older dialect unless `fields` has a dtype."""
    kind = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower(), "pad_token_id": 0}
    dialect = {} if "dtype" in fields else {"torch_dtype": "float32", "rope_theta": 10000.0}
    return kind | SIZES | {"tie_word_embeddings": False} | dialect | fields


def _neox(**fields: Any) -> dict[str, Any]:
    config = _config("GPTNeoX", layer_norm_eps=1e-5, rotary_emb_base=10000, **fields)
    kept = {"hidden_act": "gelu", "model_type": "gpt_neox"}
    for name in ("rms_norm_eps", "rope_theta", "num_key_value_heads"):
        del config[name]
    return config | kept


def _mpt(**fields: Any) -> dict[str, Any]:
    config = {"architectures": ["MptForCausalLM"], "model_type": "mpt", "pad_token_id": 0}
    sizes = {"d_model": 64, "n_layers": 3, "vocab_size": 256, "max_seq_len": 512}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"}
    return config | sizes | ids | {"expansion_ratio": 4, "layer_norm_epsilon": 1e-5} | fields


def _falcon(**fields: Any) -> dict[str, Any]:
    config = _config("Falcon", layer_norm_epsilon=1e-5, tie_word_embeddings=True, **fields)
    for name in ("rms_norm_eps", "num_key_value_heads", "hidden_act", "intermediate_size"):
        del config[name]
    return config


# The variations of published models, at a small size.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": _config("Llama", num_key_value_heads=4, rope_scaling=None),
    "llama3": _config("Llama", rope_theta=500000.0, eos_token_id=[2, 3]),
    "llama31": _config("Llama", rope_theta=500000.0, rope_scaling=LLAMA3),
    "llama32": _config("Llama", rope_theta=500000.0, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "llama_biases": _config("Llama", attention_bias=True, mlp_bias=True),
    "mistral": _config("Mistral", sliding_window=24, head_dim=32),
    "mistral_full": _config("Mistral", sliding_window=None, rope_theta=1000000.0),
    "qwen2": _config("Qwen2", tie_word_embeddings=True, rope_theta=1000000.0),
    "qwen2_window": _config(
        "Qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    "qwen3": _config("Qwen3", head_dim=32, rope_theta=1000000.0),
    "smollm2": _config(
        "Llama",
        num_attention_heads=3,
        num_key_value_heads=1,
        hidden_size=48,
        tie_word_embeddings=True,
    ),
    "tinyllama": _config("Llama", num_attention_heads=8, num_key_value_heads=1),
    "linear": _config("Llama", rope_scaling={"type": "linear", "factor": 4.0}),
    "yarn": _config("Qwen2", rope_scaling=YARN),
    "linear_new": _config(
        "Llama",
        dtype="float32",
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama31_new": _config(
        "Llama", dtype="float32", rope_parameters={**LLAMA3, "rope_theta": 500000.0}
    ),
    "yarn_new": _config(
        "Qwen3",
        head_dim=16,
        dtype="float32",
        rope_parameters={**YARN, "rope_theta": 10000.0, "beta_fast": 24.0, "beta_slow": 2.0},
    ),
    "mistral_new": _config(
        "Mistral",
        sliding_window=24,
        dtype="float32",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen3_layers": _config(
        "Qwen3",
        head_dim=32,
        dtype="float32",
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}

OTHERS = {  # families that are not of Llama's form
    "smollm3": _config("SmolLM3", no_rope_layers=[1, 0, 1], tie_word_embeddings=True),
    "smollm3_window": _config(
        "SmolLM3", no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=24
    ),
    "olmo2": _config("Olmo2"),
    "granite": _config(
        "Granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
        logits_scaling=8.0,
    ),
    "gemma2": _config(
        "Gemma2",
        head_dim=32,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        sliding_window=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    ),
    "gemma3": _config(
        "Gemma3",
        head_dim=32,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        sliding_window=24,
        sliding_window_pattern=3,
        rope_local_base_freq=1000.0,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    | {"model_type": "gemma3_text"},
    "phi3": _config("Phi3", sliding_window=None),
    "phi3_window": _config("Phi3", sliding_window=24),
    "phi4": _config("Phi3", sliding_window=None, partial_rotary_factor=0.75),
    "phi4_longrope": _config(
        "Phi3",
        sliding_window=None,
        partial_rotary_factor=0.75,
        max_position_embeddings=2048,
        original_max_position_embeddings=512,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    ),
    "neox": _neox(),
    "neox_sequential": _neox(use_parallel_residual=False, rotary_pct=0.5),
    "neox_without_biases": _neox(attention_bias=False, rotary_pct=1.0),
    "mpt": _mpt(n_heads=4),
    "mpt_six_heads": _mpt(n_heads=6, d_model=96, attn_config={"clip_qkv": 1.5, "alibi": True}),
    "falcon7b": _falcon(multi_query=True),
    "falcon40b": _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon11b": _falcon(
        new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=True
    ),
    "falcon_rw": _falcon(multi_query=False, parallel_attn=False, alibi=True, bias=True),
    "olmo3": _config(
        "Olmo3", sliding_window=24, rope_theta=500000.0, rope_scaling=YARN, num_hidden_layers=4
    ),
    "glm": _config("Glm", head_dim=32, partial_rotary_factor=0.5),
    "glm4": _config("Glm4", head_dim=16, attention_bias=False),
    "cohere2": _config(
        "Cohere2",
        sliding_window=24,
        sliding_window_pattern=2,
        logit_scale=0.25,
        layer_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "mixtral": _config("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=24),
    "qwen3_moe": _config("Qwen3Moe", head_dim=16, norm_topk_prob=True, mlp_only_layers=[1], **MOE)
    | {"model_type": "qwen3_moe"},
    "olmoe": _config("Olmoe", clip_qkv=1.5, num_experts=8, num_experts_per_tok=3),
    "gpt_oss": _config(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        head_dim=16,
        swiglu_limit=0.5,
        rope_scaling=YARN | {"truncate": False},
    )
    | {"model_type": "gpt_oss"},
    "exaone4": _config("Exaone4", sliding_window=24, sliding_window_pattern=2),
    "exaone4_full": _config("Exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
    "ministral3": _config(
        "Ministral3",
        head_dim=16,
        dtype="float32",
        rope_parameters=YARN
        | {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
        | {"original_max_position_embeddings": 40},
    ),
}
FAMILIES |= OTHERS


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def tensors(folder: Path, seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Random weights for the config.json in `folder`, under Hugging Face's names."""
    random = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = random.standard_normal(shape, np.float32)
        if len(shape) > 1:
            values *= shape[-1] ** -0.5
        else:  # norms are around 1, biases around 0
            values = values / 8 + (0.0 if name.endswith("bias") else 1.0)
        return values.astype(jnp.dtype(dtype))

    return {name: draw(name, shape) for name, shape in stored_shapes(read_config(folder)).values()}


def write_tensors(folder: Path, weights: Mapping[str, np.ndarray], shards: int = 1) -> None:
    """Write model.safetensors, or `shards` files and their index."""
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors")
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    place = {name: files[i % shards] for i, name in enumerate(weights)}
    for file in files:
        part = {name: weights[name] for name in weights if place[name] == file}
        save_file(part, folder / file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": place})


def write_model(
    folder: Path,
    config: str | Mapping[str, Any],
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
) -> Path:
    """Write a model folder without a tokenizer.

    config: a name in FAMILIES, or the contents of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", FAMILIES[config] if isinstance(config, str) else config)
    write_tensors(folder, tensors(folder, seed, dtype), shards)
    return folder
