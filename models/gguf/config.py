"""The config of a GGUF file: its metadata in the terms of config.json, then read like one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxkv.errors import UserError
from jaxkv.models.config import Config, config_of
from jaxkv.models.gguf.header import Header, corrupt, gguf_package
from jaxkv.models.gguf.names import EMBED, HEAD, ROPE_FACTORS
from jaxkv.models.gguf.weights import read
from jaxkv.rotary import rotary

# Architectures of GGUF files. Most files of Mistral models say llama.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# config.json's key -> key in the metadata, after "ARCHITECTURE."; True: required.
KEYS = {
    "hidden_size": ("embedding_length", True),
    "intermediate_size": ("feed_forward_length", True),
    "num_hidden_layers": ("block_count", True),
    "num_attention_heads": ("attention.head_count", True),
    "num_key_value_heads": ("attention.head_count_kv", False),
    "head_dim": ("attention.key_length", False),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", True),
    "max_position_embeddings": ("context_length", True),
    "sliding_window": ("attention.sliding_window", False),
}
# Factors that other architectures of the same tensors apply; none of ours does.
UNSUPPORTED = ("expert_count", "logit_scale", "residual_scale", "embedding_scale",
               "attention.scale", "attn_logit_softcapping", "final_logit_softcapping")  # fmt: skip
# Biases: field of Config -> the tensor whose presence decides.
BIASES = {
    "qkv_bias": "blk.0.attn_q.bias",
    "out_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_gate.bias",
}
# The ends of a text: of the document, of a turn, of a message (before a tool's answer).
ENDS = ("eos", "eot", "eom")


def read_config(header: Header) -> Config:
    """The description of the model; raises UserError where it is not supported."""
    architecture, (family, given) = _architecture(header), described(header)
    config = config_of(family, given, {}, header.path)
    config = dataclasses.replace(
        config, **{field: tensor in header.tensors for field, tensor in BIASES.items()}
    )
    return _with_rope_factors(header, architecture, config)


def described(header: Header) -> tuple[str, dict[str, Any]]:
    """The family of the model, and its metadata as the fields of config.json.

    Raises UserError where it is not supported.
    """
    architecture = _architecture(header)
    given = {key: _number(header, architecture, *entry) for key, entry in KEYS.items()}
    family = architecture
    if architecture == "llama" and given["sliding_window"]:
        family = "mistral"  # a Llama whose layers all have a window
    fields = given | {
        "vocab_size": _vocab(header),
        "head_dim": _head_dim(header, architecture, given),
        "tie_word_embeddings": HEAD not in header.tensors,
        "torch_dtype": _dtype(header),
        "rope_theta": header.get(f"{architecture}.rope.freq_base", float, 10000.0),
        "rope_scaling": _scaling(header, architecture),
        "bos_token_id": header.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": list(ends(header)),
        "attention_bias": BIASES["qkv_bias"] in header.tensors,
        "mlp_bias": BIASES["mlp_bias"] in header.tensors,
    }
    return family, fields


def ends(header: Header) -> tuple[int, ...]:
    """The token ids that end a text."""
    ids = (header.get(f"tokenizer.ggml.{name}_token_id", int) for name in ENDS)
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _architecture(header: Header) -> str:
    name = header.get("general.architecture", str)
    if name is None:
        raise UserError(
            f"{header.path}: missing field general.architecture; it is no model that can be run: "
            f"supported architectures: {', '.join(ARCHITECTURES)}"
        )
    if name not in ARCHITECTURES:
        raise UserError(
            f"{header.path}: unsupported architecture {name}; supported: {', '.join(ARCHITECTURES)}"
        )
    for key in UNSUPPORTED:
        if value := header.fields.get(f"{name}.{key}"):
            what = " (a mixture of experts)" if key == "expert_count" else ""
            raise UserError(
                f"{header.path}: {name}.{key} must be absent or 0, got {value!r}{what}; "
                "use another model"
            )
    return name


def _number(header: Header, architecture: str, name: str, required: bool) -> Any:
    """A field's value; a list of one value per layer counts as that value if all are equal."""
    key = f"{architecture}.{name}"
    value = header.fields.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UserError(
                f"{header.path}: {key} must be the same for all layers, got {value!r:.60}; "
                "use another model"
            )
        value = value[0]
    if value is None and required:
        raise UserError(f"{header.path}: missing field {key}; download it again")
    return value


def _head_dim(header: Header, architecture: str, given: dict[str, Any]) -> Any:
    """The head dim, after checks that keys and values share it and that all of it is rotated."""
    head_dim = given["head_dim"]
    if head_dim is None and isinstance(given["num_attention_heads"], int):
        head_dim = given["hidden_size"] // max(given["num_attention_heads"], 1)
    for name in ("attention.value_length", "rope.dimension_count"):
        value = header.fields.get(f"{architecture}.{name}", head_dim)
        if value != head_dim:
            raise UserError(
                f"{header.path}: {architecture}.{name} must be the head dim {head_dim}, got "
                f"{value!r}; use another model"
            )
    return given["head_dim"]


def _vocab(header: Header) -> int:
    if EMBED not in header.tensors:
        raise UserError(f"{header.path}: missing tensor {EMBED}; download it again")
    return header.tensors[EMBED].shape[0]


def _dtype(header: Header) -> str:
    """The widest dtype that keeps what the file stores; bfloat16 where it is quantised."""
    types = gguf_package().GGMLQuantizationType
    found = {tensor.type for tensor in header.tensors.values()}
    if found == {types.F32.value}:
        return "float32"
    return "float16" if found <= {types.F32.value, types.F16.value} else "bfloat16"


def _scaling(header: Header, architecture: str) -> dict[str, Any]:
    """rope_scaling of config.json; empty for plain positions."""
    prefix = f"{architecture}.rope.scaling."
    kind = header.get(prefix + "type", str, "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{header.path}: unsupported {prefix}type {kind!r}; supported: none, linear, yarn"
        )
    factor = header.get(prefix + "factor", float)
    if factor is None or not factor > 0:
        raise UserError(f"{header.path}: {prefix}factor must be above 0, got {factor!r}")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    names = {"original_context_length": "original_max_position_embeddings",
             "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}  # fmt: skip
    for name, theirs in names.items():
        if (value := header.fields.get(prefix + name)) is not None:
            scaling[theirs] = value
    if amplitude := header.get(prefix + "attn_factor", float):
        # llama.cpp multiplies it with YaRN's own temperature; config.json gives the product.
        scaling["attention_factor"] = amplitude * (1 + 0.1 * float(np.log(max(factor, 1.0))))
    return scaling


def _with_rope_factors(header: Header, architecture: str, config: Config) -> Config:
    """The config with the divisors of rotary frequencies that Llama 3.1 and later come with."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return config
    if tensor.shape != (config.head_dim // 2,):
        raise UserError(
            f"wrongly shaped tensor in {header.path}: {ROPE_FACTORS} is {list(tensor.shape)}, its "
            f"metadata says {[config.head_dim // 2]}; download it again"
        )
    factors = read(tensor, np.dtype("f4")).astype(np.float64)
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise corrupt(header.path, f"{ROPE_FACTORS} must be above 0 and finite")
    theta = header.get(f"{architecture}.rope.freq_base", float, 10000.0)
    scaling = {"kind": "factors", "factors": tuple(factors.tolist())}
    return dataclasses.replace(config, encoding=rotary(config.head_dim, theta, scaling))
