"""GGUF files of every family, written as llama.cpp's converter does, equal the folder.

The names of tensors are those of the package `gguf`. What the converter does with values, and which
fields it writes, is written again here from its sources (conversion/ of llama.cpp, 2026).
"""

from __future__ import annotations

import math
import re

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from jaxkv.errors import UserError
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.config import read_config as folder_config
from jaxkv.models.loading.gguf import read_config, read_header, weights
from jaxkv.models.loading.source import open_source
from jaxkv.rotary import Rotary
from tests.models.folders import FAMILIES, LLAMA3, write_model
from tests.models.gguf.files import hf_model, write_gguf
from tests.models.test_parity import FULL, prefill, untokenized

HEADS = 4
GEMMA = {"query_pre_attn_scalar": 32}  # llama.cpp takes the head dim
FALCON = {"attention.layer_norm_epsilon": 1e-5, "tensor_data_layout": "jploski"}  # fmt: skip
AMPLITUDE = (1 + math.log(2048 / 512) / math.log(512)) ** 0.5  # of LongRoPE
# The model of folders.py, changes of its config.json, the architecture, and fields of the file.
# tinyllama and smollm2 have fewer KV heads than query heads, which are permuted by their own
# number; smollm2, llama32 and qwen2 have a tied head; rows of qwen2 and qwen3 are not permuted.
FILES = {
    "tinyllama": ({}, "llama", {}),
    "smollm2": ({}, "llama", {}),
    "llama32": ({}, "llama", {}),
    "llama_biases": ({}, "llama", {}),
    "mistral": ({}, "llama", {"attention.sliding_window": 24}),
    "qwen2": ({}, "qwen2", {}),
    "qwen3": ({}, "qwen3", {}),
    "gemma2": (GEMMA, "gemma2", {"attention.sliding_window": 24, "attn_logit_softcapping": 5.0,
                                 "final_logit_softcapping": 3.0}),
    "gemma3": (GEMMA | {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
                        "num_hidden_layers": 7},
               "gemma3", {"attention.sliding_window": 24}),
    "granite": ({}, "granite", {"embedding_scale": 12.0, "residual_scale": 0.22,
                                "attention.scale": 0.1, "logit_scale": 8.0}),
    "smollm3": ({"no_rope_layers": None, "num_hidden_layers": 5}, "smollm3", {}),
    "olmo2": ({}, "olmo2", {}),
    "olmo3": ({}, "olmo2", {"attention.sliding_window": 24, "rope.scaling.type": "yarn",
                            "rope.scaling.factor": 4.0,
                            "rope.scaling.original_context_length": 128,
                            "attention.sliding_window_pattern": [True, True, True, False]}),
    "phi3": ({}, "phi3", {"attention.sliding_window": 0}),
    "phi4": ({}, "phi3", {"attention.sliding_window": 0, "rope.dimension_count": 12}),
    "phi4_longrope": ({}, "phi3", {"attention.sliding_window": 0, "rope.dimension_count": 12,
                                   "rope.scaling.attn_factor": AMPLITUDE,
                                   "rope.scaling.original_context_length": 512}),
    "cohere2": ({"sliding_window_pattern": 4, "num_hidden_layers": 5}, "cohere2",
                {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.25,
                 "attention.sliding_window": 24}),
    "glm": ({"head_dim": None, "partial_rotary_factor": 0.5}, "chatglm",
            {"rope.dimension_count": 8}),
    "glm4": ({"attention_bias": True, "partial_rotary_factor": 0.5}, "glm4",
             {"rope.dimension_count": 8}),
    "exaone4": ({}, "exaone4", {"attention.sliding_window": 24,
                                "attention.sliding_window_pattern": [True, False, True]}),
    "exaone4_full": ({}, "exaone4", {}),
    "neox": ({}, "gptneox", {"rope.dimension_count": 4, "use_parallel_residual": True,
                             "attention.layer_norm_epsilon": 1e-5}),
    "falcon7b": ({}, "falcon", FALCON | {"attention.head_count_kv": 1}),
    "falcon40b": ({}, "falcon", FALCON | {"attention.head_count_kv": 2}),
    "falcon11b": ({"bias": False}, "falcon", FALCON | {"attention.head_count_kv": 2}),
    "mpt": ({}, "mpt", {"attention.layer_norm_epsilon": 1e-5, "attention.max_alibi_bias": 8.0}),
    "ministral3": ({}, "mistral3",
                   {"attention.temperature_scale": 0.3, "rope.scaling.yarn_log_multiplier": 1.0,
                    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                    "rope.scaling.original_context_length": 40}),
    "mixtral": ({"sliding_window": None}, "llama", {"expert_count": 4, "expert_used_count": 2}),
    "qwen3_moe": ({"mlp_only_layers": []}, "qwen3moe",
                  {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}),
    "olmoe": ({"clip_qkv": None}, "olmoe", {"expert_count": 8, "expert_used_count": 3}),
    "gpt_oss": ({"swiglu_limit": 7.0}, "gpt-oss",
                {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96,
                 "attention.sliding_window": 24, "rope.scaling.type": "yarn",
                 "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}),
}  # fmt: skip


def one_after_another(weight, head_dim=16):
    """All queries, all keys and all values, from the queries, the key and the value of each KV
    head."""
    rows = weight.reshape(-1, head_dim, *weight.shape[1:])
    kv_heads = (len(rows) - HEADS) // 2
    groups = rows.reshape(kv_heads, -1, *rows.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return np.concatenate([part.reshape(-1, *weight.shape[1:]) for part in parts])


def converted(architecture, weights):
    """The tensors of a folder as llama.cpp's converter passes them to its table of names."""
    out, experts = {}, {}
    for name, weight in weights.items():
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        if "attention.query_key_value" in name:
            weight = one_after_another(weight)
        if match := re.match(r"(.*experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault((match[1], match[3]), []).append(weight)
        elif name.endswith("sinks"):
            out[f"{name}.weight"] = weight
        elif ".experts." in name:
            kind = ".bias" if name.endswith("_bias") else ".weight"
            weight = weight if kind == ".bias" else weight.swapaxes(1, 2)
            base = name.removesuffix("_bias")
            if "down_proj" in name:
                out[base + kind] = weight
            else:
                for i, part in enumerate(("gate_proj", "up_proj")):
                    out[base.replace("gate_up_proj", part) + kind] = weight[:, i::2]
        else:
            out[name] = weight
    for (prefix, part), matrices in experts.items():
        if prefix.endswith("block_sparse_moe.experts"):
            prefix = prefix.replace("model.layers", "layers").replace(
                "block_sparse_moe", "feed_forward"
            )
        out[f"{prefix}.{part}.weight"] = np.stack(matrices)
    return out


def write(folder, name, types=lambda name: Type.F32, **more):
    """A GGUF file of the model, beside its folder; more: changes of config.json."""
    changes, architecture, fields = FILES[name]
    changes = changes | more
    config, weights = hf_model(folder, name, **changes)
    write_model(folder, FAMILIES[name] | changes)

    def change(writer, tensors):
        for kind in ("long", "short") if name == "phi4_longrope" else ():
            factors = config["rope_scaling"][f"{kind}_factor"]
            tensors[f"rope_factors_{kind}.weight"] = np.asarray(factors, np.float32)
        for key, value in fields.items():
            if key == "rope.dimension_count":
                continue  # written already
            kinds = {list: "array", str: "string", int: "uint32", float: "float32", bool: "bool"}
            add = getattr(writer, f"add_{kinds[type(value)]}")
            add(f"{architecture}.{key}", value)

    return write_gguf(
        folder / "model.gguf", config, converted(architecture, weights), change=change,
        architecture=architecture, rope_dims=fields.get("rope.dimension_count"), types=types,
    )  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_equals_the_folder(name, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "WINDOW", 1000)  # several pieces per tensor, the last one shorter
    path = write(tmp_path, name)
    ids = np.random.default_rng(4).integers(0, 256, 90).tolist()
    expected, actual = (
        prefill(Stream(untokenized(source), FULL), [ids])[0] for source in (tmp_path, path)
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)
    config = read_config(read_header(path))
    assert config.family == FAMILIES[name]["model_type"]


def test_divisors_of_frequencies_are_those_of_llama_3(tmp_path):
    """As the converter writes them for EXAONE 4, whose full layers do not rotate."""
    rope = {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "head_dim": 16}
    path = write(tmp_path, "exaone4", **rope)
    config, expected = read_config(read_header(path)), folder_config(tmp_path)
    for actual, encoding in zip(config.encodings, expected.encodings, strict=True):
        assert type(actual) is type(encoding)
        if isinstance(encoding, Rotary):
            near = np.asarray(actual.frequencies), np.asarray(encoding.frequencies)
            np.testing.assert_allclose(*near, rtol=1e-6, atol=1)


def test_experts_in_mxfp4(tmp_path):
    """A file of gpt-oss as it is published: matrices of experts are in blocks of 4 bits."""
    in_blocks = lambda name: Type.MXFP4 if "_exps" in name else Type.F32
    path = write(tmp_path, "gpt_oss", types=in_blocks)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    weights = open_source(path).weights("float32")
    for part in ("gate", "up", "down"):
        tensor = stored[f"blk.1.ffn_{part}_exps.weight"]
        assert tensor.tensor_type == Type.MXFP4
        expected = gguf.dequantize(tensor.data, Type.MXFP4)
        np.testing.assert_array_equal(weights[f"layers.1.expert_{part}"], expected)


@pytest.mark.parametrize(
    "name, key, value, said",
    [("granite", "attention.sliding_window", 128, "sliding_window must be"),
     ("qwen3_moe", "attention.sliding_window", 128, "sliding_window must be"),
     ("gemma2", "attention.sliding_window_pattern", 3, "sliding_window_pattern must be"),
     ("granite", "rope.scaling.attn_factor", 1.2, "attn_factor must be 1 without the type yarn"),
     ("phi3", "rope.dimension_count", 4.0, "phi3.rope.dimension_count must be of type int"),
     ("phi3", "attention.head_count", 0, "num_attention_heads must be a whole number")],
)  # fmt: skip
def test_a_field_that_llama_cpp_does_not_apply_is_refused(name, key, value, said, tmp_path):
    changes, architecture, fields = FILES[name]
    config, weights = hf_model(tmp_path, name, **changes)

    def change(writer, _):
        for field, stored in (fields | {key: value}).items():
            add = writer.add_float32 if isinstance(stored, float) else writer.add_uint32
            add(f"{architecture}.{field}", stored)

    if key == "attention.head_count":
        config = config | {"num_attention_heads": 0, "head_dim": 16}
    path = write_gguf(tmp_path / "m.gguf", config, converted(architecture, weights),
                      change=change, architecture=architecture)  # fmt: skip
    with pytest.raises(UserError, match=said):
        read_config(read_header(path))
