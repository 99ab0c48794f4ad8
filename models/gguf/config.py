"""The config of a GGUF file: its metadata in the terms of config.json, then read like one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxkv.errors import UserError
from jaxkv.models.config import MOST, Config, config_of
from jaxkv.models.gguf.header import Header, corrupt, gguf_package
from jaxkv.models.gguf.names import EMBED, HEAD, ROPE_FACTORS
from jaxkv.models.gguf.weights import read
from jaxkv.rotary import rotary

# Architectures of GGUF files. Most files of Mistral models say llama.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# config.json's key -> key in the metadata, after "ARCHITECTURE."; its type; True: required.
KEYS = {
    "hidden_size": ("embedding_length", int, True),
    "intermediate_size": ("feed_forward_length", int, True),
    "num_hidden_layers": ("block_count", int, True),
    "num_attention_heads": ("attention.head_count", int, True),
    "num_key_value_heads": ("attention.head_count_kv", int, False),
    "head_dim": ("attention.key_length", int, False),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float, True),
    "max_position_embeddings": ("context_length", int, True),
    "sliding_window": ("attention.sliding_window", int, False),
    "rope_theta": ("rope.freq_base", float, False),
}
# The same for positions under "ARCHITECTURE.rope.scaling.".
SCALING = {
    "factor": ("factor", float, False),
    "original_max_position_embeddings": ("original_context_length", int, False),
    "beta_fast": ("yarn_beta_fast", float, False),
    "beta_slow": ("yarn_beta_slow", float, False),
    "attention_factor": ("attn_factor", float, False),
}
# Other whole numbers are at least 1; other floats are above 1e-30. A window of 0 is none.
LEAST = {"sliding_window": 0, "rope_theta": 1}
THETA = 10000.0  # where a file does not say
# Factors that other architectures of the same tensors apply; none of ours does.
UNSUPPORTED = ("expert_count", "logit_scale", "residual_scale", "embedding_scale",
               "attention.scale", "attn_logit_softcapping", "final_logit_softcapping")  # fmt: skip
# Biases: field of Config -> the tensor whose presence decides.
BIASES = {
    "qkv_bias": "blk.0.attn_q.bias",
    "out_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_gate.bias",
}
TOKENS = "tokenizer.ggml.tokens"
NO_TOKEN = 2**32 - 1  # some converters write this id where a model has no such token
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
    given = {key: _number(header, f"{architecture}.", key, *entry) for key, entry in KEYS.items()}
    _check_heads(header, architecture, given)
    family = architecture
    if architecture == "llama" and given["sliding_window"]:
        family = "mistral"  # a Llama whose layers all have a window
    fields = given | {
        "vocab_size": rows_of_embedding(header),
        "tie_word_embeddings": HEAD not in header.tensors,
        "torch_dtype": _dtype(header),
        "rope_theta": given["rope_theta"] or THETA,
        "rope_scaling": _scaling(header, architecture),
        "bos_token_id": token_id(header, "bos"),
        "eos_token_id": list(ends(header)),
        "attention_bias": BIASES["qkv_bias"] in header.tensors,
        "mlp_bias": BIASES["mlp_bias"] in header.tensors,
    }
    return family, fields


def ends(header: Header) -> tuple[int, ...]:
    """The token ids that end a text."""
    ids = (token_id(header, name) for name in ENDS)
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def tokens_of(header: Header) -> list[str]:
    """The vocabulary; raises UserError where it has more tokens than the embedding has rows."""
    tokens, rows = header.need(TOKENS, list[str]), rows_of_embedding(header)
    if len(tokens) > rows:
        why = f"{TOKENS} must have at most one token per row of {EMBED}, {rows}, got {len(tokens)}"
        raise corrupt(header.path, why)
    return tokens


def token_id(header: Header, name: str) -> int | None:
    """A special token, None where the file has none; raises UserError for an id without a token."""
    key, size = f"tokenizer.ggml.{name}_token_id", len(tokens_of(header))
    found = header.get(key, int)
    if found in (None, NO_TOKEN):
        return None
    if not 0 <= found < size:
        raise corrupt(header.path, f"{key} must be from 0 to {size - 1}, got {found}")
    return found


def rows_of_embedding(header: Header) -> int:
    """The size of the vocabulary with its padding."""
    if EMBED not in header.tensors:
        raise UserError(f"{header.path}: missing tensor {EMBED}; download it again")
    shape = header.tensors[EMBED].shape
    if len(shape) != 2 or 0 in shape:
        raise corrupt(header.path, f"{EMBED} must have rows and columns, got {list(shape)}")
    return shape[0]


def _architecture(header: Header) -> str:
    name, supported = header.get("general.architecture", str), ", ".join(ARCHITECTURES)
    if name is None:
        raise UserError(
            f"{header.path}: missing field general.architecture; it is no model that can be run: "
            f"supported architectures: {supported}"
        )
    if name not in ARCHITECTURES:
        raise UserError(
            f"{header.path}: unsupported architecture {name!r:.60}; supported: {supported}"
        )
    for key in UNSUPPORTED:
        if value := header.fields.get(f"{name}.{key}"):
            what = " (a mixture of experts)" if key == "expert_count" else ""
            raise UserError(
                f"{header.path}: {name}.{key} must be absent or 0, got {value!r:.60}{what}; "
                "use another model"
            )
    return name


def _number(header: Header, prefix: str, ours: str, name: str, kind: type, required: bool) -> Any:
    """A field's value; a list of one value per layer counts as that value if all are equal.

    ours: its key in config.json, which decides its range.
    """
    key = prefix + name
    value = header.fields.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UserError(
                f"{header.path}: {key} must be the same for all layers, got {value!r:.60}; "
                "use another model"
            )
        value = value[0]
    if value is None:
        return header.need(key, kind) if required else None
    least, most = LEAST.get(ours, 1 if kind is int else 1e-30), MOST.get(ours, 2**31 - 1)
    header.checked(key, value, kind)
    if kind is int and not least <= value <= most:
        raise corrupt(header.path, f"{key} must be from {least} to {most}, got {value}")
    if kind is float and not least < value < 1e30:
        raise corrupt(header.path, f"{key} must be above {least} and below 1e30, got {value}")
    return value


def _check_heads(header: Header, architecture: str, given: dict[str, Any]) -> None:
    """Raise UserError unless heads divide, and keys and values share a head dim, all rotated."""
    width, heads = given["hidden_size"], given["num_attention_heads"]
    kv_heads, head_dim = given["num_key_value_heads"] or heads, given["head_dim"]
    key = f"{architecture}.attention.head_count"
    if heads % kv_heads:
        why = f"{key} must be a multiple of {key}_kv, got {heads} and {kv_heads}"
        raise corrupt(header.path, why)
    if head_dim is None and width % heads:
        why = (
            f"{architecture}.embedding_length must be a multiple of {key}, got {width} and {heads}"
        )
        raise corrupt(header.path, why)
    head_dim = head_dim or width // heads
    if head_dim % 2:
        raise corrupt(header.path, f"its head dim must be even, got {head_dim}")
    for name in ("attention.value_length", "rope.dimension_count"):
        value = header.fields.get(f"{architecture}.{name}", head_dim)
        if value != head_dim:
            raise UserError(
                f"{header.path}: {architecture}.{name} must be the head dim {head_dim}, got "
                f"{value!r:.60}; use another model"
            )


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
    # As in llama.cpp, a factor without a type is linear, and an older key of one counts.
    old = header.get(f"{architecture}.rope.scale_linear", float)
    given = old is not None or prefix + "factor" in header.fields
    kind = header.get(prefix + "type", str, "linear" if given else "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{header.path}: unsupported {prefix}type {kind!r:.60}; supported: none, linear, yarn"
        )
    found = {key: _number(header, prefix, key, *entry) for key, entry in SCALING.items()}
    found["factor"] = found["factor"] or old or header.need(prefix + "factor", float)
    if amplitude := found["attention_factor"]:
        # llama.cpp multiplies it with YaRN's own temperature; config.json gives the product.
        temperature = 1 + 0.1 * float(np.log(max(found["factor"], 1.0)))
        found["attention_factor"] = amplitude * temperature
    return {"rope_type": kind} | {key: value for key, value in found.items() if value is not None}


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
    theta = header.get(f"{architecture}.rope.freq_base", float, THETA)
    scaling = {"kind": "factors", "factors": tuple(factors.tolist())}
    return dataclasses.replace(config, encoding=rotary(config.head_dim, theta, scaling))
