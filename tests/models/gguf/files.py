"""Writes small GGUF files with the package `gguf`, from the same configs as model folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers

from jaxkv.models.loading.gguf import read_header
from jaxkv.models.loading.gguf.header import Header
from tests.models.folders import FAMILIES, tensors, write_json

CONTROL = gguf.TokenType.CONTROL
ARCHITECTURES = {name: name for name in ("llama", "qwen2", "qwen3")} | {"mistral": "llama"}
PAIRED = ("llama", "mistral", "mixtral", "ministral3", "granite", "smollm3")
MPT_NAMES = {"d_model": "hidden_size", "n_heads": "num_attention_heads",
             "n_layers": "num_hidden_layers", "max_seq_len": "max_position_embeddings"}  # fmt: skip
MPT = {"intermediate_size": 256}  # four times the width of the small model


def written(path: Path, fill: Callable[[gguf.GGUFWriter], object]) -> Header:
    """The header of a file with one tensor and the fields that `fill` adds to its writer."""
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.add_tensor("token_embd.weight", np.zeros((512, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(path)


def byte_tokens(size: int) -> list[str]:
    """A byte-level vocabulary: two special tokens, a merge, the bytes, and fillers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|begin|>", "<|end|>", "!!", *alphabet][:size]
    return tokens + [f"[filler {i}]" for i in range(size - len(tokens))]


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head as rotary pairs, as files of the architecture llama store them."""
    size = len(weight) // heads
    order = [
        head * size + half * (size // 2) + pair
        for head in range(heads)
        for pair in range(size // 2)
        for half in range(2)
    ]
    return weight[order]


def llama3_factors(config: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """rope_freqs.weight: the divisor of each frequency under Llama 3.1's scaling."""
    rope, factors = config["rope_scaling"], []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * pair / head_dim)
        rotations = rope["original_max_position_embeddings"] / wavelength
        if rotations > rope["high_freq_factor"]:
            factors.append(1.0)
        elif rotations < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            blend = (rotations - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - blend) / rope["factor"] + blend))
    return np.asarray(factors, np.float32)


def hf_model(folder: Path, name: str, **fields: Any) -> tuple[dict, dict[str, np.ndarray]]:
    """The config.json of a family, written to `folder`, and random weights for it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = FAMILIES[name] | fields
    write_json(folder / "config.json", config)
    return config, tensors(folder)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    types: Callable[[str], Type] = lambda name: Type.F32,
    change: Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None] = lambda w, t: None,
    tokenizer: Callable[[gguf.GGUFWriter, int], None] | None = None,
    architecture: str | None = None,
    rope_dims: int | None = None,
    **options: Any,
) -> Path:
    """Write a model.

    config, weights: in Hugging Face's terms. types: the type of a tensor by its name in the file.
    change: changes the tensors, or adds fields, before they are written. rope_dims: rotated dims of
    a head, by default all. options: of GGUFWriter.
    """
    architecture = architecture or ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, **options)
    config = MPT | {MPT_NAMES.get(name, name): value for name, value in config.items()}
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if "num_key_value_heads" in config:
        writer.add_head_count_kv(kv_heads)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(rope_dims or head_dim)
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "rope_theta" in config:
        writer.add_rope_freq_base(config["rope_theta"])
    (tokenizer or add_byte_tokenizer)(writer, config["vocab_size"])
    converted = in_gguf_names(config, weights, architecture, heads, kv_heads)
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        converted["rope_freqs.weight"] = llama3_factors(config, head_dim)
    change(writer, converted)
    for name, weight in converted.items():
        kind = types(name) if weight.ndim > 1 else Type.F32
        writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def in_gguf_names(
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    architecture: str,
    heads: int,
    kv_heads: int,
) -> dict[str, np.ndarray]:
    """Weights under the names that the package `gguf` gives them, in pairs of rows where needed."""
    # The package has no architecture mistral; its tensors are those of llama.
    model_numbers = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    model = model_numbers[ARCHITECTURES.get(architecture, architecture)]
    names = gguf.get_tensor_name_map(model, config["num_hidden_layers"])
    converted = {}
    for name, weight in weights.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name, name
        if config["model_type"] in PAIRED and "attn_q." in gguf_name:
            weight = paired(weight, heads)
        if config["model_type"] in PAIRED and "attn_k." in gguf_name:
            weight = paired(weight, kv_heads)
        converted[gguf_name] = weight
    return converted


def add_byte_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level tokenizer with one merge, split as SmolLM2 does."""
    tokens = byte_tokens(size)
    kinds = [CONTROL, CONTROL] + [gguf.TokenType.NORMAL] * (size - 2)
    add_bpe(writer, tokens, kinds, ["! !"], "smollm")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def add_bpe(
    writer: gguf.GGUFWriter, tokens: list[str], kinds: list[int], merges: list[str], pre: str | None
) -> None:
    """The fields of a byte-level BPE; pre: None leaves the pre-tokenizer's name out."""
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if merges:
        writer.add_token_merges(merges)
