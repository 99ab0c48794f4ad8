"""config.json: both dialects, every family, and refused values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jaxkv.errors import UserError
from jaxkv.models.loading.config import read_config
from jaxkv.models.loading.known_fields import APPLIED
from jaxkv.models.loading.weight_names import stored_shapes
from jaxkv.models.network.config import Config
from tests.models.folders import FAMILIES, LLAMA3, ROPES, SIZES, write_json


def read(folder: Path, config: dict[str, Any], generation: dict | None = None) -> Config:
    write_json(folder / "config.json", config)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    return read_config(folder)


def test_dialects_agree(tmp_path):
    for old, new in (("linear", "linear_new"), ("llama31", "llama31_new")):
        assert read(tmp_path, FAMILIES[old]) == read(tmp_path, FAMILIES[new])


def test_original_length_defaults_to_the_context(tmp_path):
    rope_scaling = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    left_out = FAMILIES["llama31"] | {"rope_scaling": rope_scaling}
    named = FAMILIES["llama31"] | {"rope_scaling": {**LLAMA3, OLD_LENGTH: 512}}
    outside = left_out | {OLD_LENGTH: 64}
    assert read(tmp_path, left_out).encoding == read(tmp_path, named).encoding
    assert read(tmp_path, outside).encoding == read(tmp_path, FAMILIES["llama31"]).encoding


OLD_LENGTH = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("name", "change", "windows"),
    [
        ("mistral", {}, (24, 24, 24)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 0}, (None, None, None)),
        ("qwen2_window", {}, (None, 24, 24)),
        ("qwen2_window", {"max_window_layers": 3}, (None, None, None)),
        ("qwen3_layers", {}, (24, None, 24)),
        ("qwen3_layers", {"max_window_layers": 0}, (24, None, 24)),
    ],
)
def test_windows(name, change, windows, tmp_path):
    assert read(tmp_path, FAMILIES[name] | change).windows == windows


def test_absent_keys_have_the_defaults_of_the_family(tmp_path):
    def bare(name: str) -> Config:
        keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        sizes = {k: SIZES[k] for k in keep} | {"num_attention_heads": 32, "hidden_size": 256}
        return read(tmp_path, {"architectures": [f"{name}ForCausalLM"]} | sizes)

    llama, mistral, qwen2, qwen3 = (bare(n) for n in ("Llama", "Mistral", "Qwen2", "Qwen3"))
    assert (llama.kv_heads, llama.context, llama.bos, llama.eos) == (32, 2048, 1, (2,))
    assert llama.dtype == "float32"
    assert (mistral.kv_heads, mistral.context, mistral.windows[0]) == (8, 131072, 4096)
    assert (qwen2.kv_heads, qwen2.context, qwen2.bos, qwen2.eos) == (32, 32768, None, ())
    assert (qwen2.head_dim, qwen3.head_dim) == (8, 128)
    assert all(c.norm_eps == 1e-6 and not c.tied for c in (llama, mistral, qwen2, qwen3))
    assert [c.qkv_bias for c in (llama, mistral, qwen2, qwen3)] == [False, False, True, False]
    qk_norms = [c.qk_norm for c in (llama, mistral, qwen2, qwen3)]
    assert qk_norms == ["none", "none", "none", "head"]


def test_biases(tmp_path):
    every = ("attention_bias", "mlp_bias")

    def biases(name: str) -> tuple[bool, bool, bool]:
        fields = {field: True for field in every if field in APPLIED[FAMILIES[name]["model_type"]]}
        config = read(tmp_path, FAMILIES[name] | fields)
        return config.qkv_bias, config.out_bias, config.mlp_bias

    assert biases("llama2") == (True, True, True)
    assert biases("qwen2") == (True, False, False)
    assert biases("qwen3") == (True, True, False)
    assert biases("mistral") == (False, False, False)


def test_eos_lists_and_generation_config(tmp_path):
    assert read(tmp_path, FAMILIES["llama3"]).eos == (2, 3)
    config = read(tmp_path, FAMILIES["llama3"], {"eos_token_id": [7, 8], "bos_token_id": 9})
    assert (config.bos, config.eos) == (9, (7, 8))
    assert read(tmp_path, FAMILIES["llama3"], {"eos_token_id": None}).eos == (2, 3)
    assert read(tmp_path, FAMILIES["llama3"], {"eos_token_id": 0}).eos == (0,)


ABSENT = object()
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # The architecture, and the kinds of values.
    ("llama2", {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
     "MambaForCausalLM; the nearest is LlamaForCausalLM"),
    ("llama2", {"architectures": ["Qwen3NextForCausalLM"]},
     "Qwen3NextForCausalLM; the nearest is Qwen3ForCausalLM"),
    ("llama2", {"architectures": ABSENT, "model_type": ABSENT}, "missing field architectures"),
    ("olmo3", {"architectures": [["LlamaForCausalLM"]]}, "unsupported architecture"),
    ("llama2", {"vocab_size": ABSENT}, "missing field vocab_size"),
    ("llama2", {"num_hidden_layers": 2.5}, "whole number.*2.5"),
    ("llama2", {"hidden_act": "gelu"}, "silu, got 'gelu'"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation must be one of silu, "),
    ("falcon7b", {"activation": "relu"}, "activation must be one of silu, "),
    ("llama2", {"torch_dtype": "float64"}, "dtype.*float64"),
    ("llama2", {"eos_token_id": "</s>"}, "eos_token_id must be"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, r"quantized weights \(fp8\)"),
    # Heads, windows and kinds of layers.
    ("mistral", {"head_dim": 7}, "config.json: .*even head dim"),
    ("llama2", {"num_key_value_heads": 3}, "multiple.* 4 and 3"),
    ("falcon40b", {"num_kv_heads": 3}, "must be a multiple of num_key_value_heads, got 4 and 3"),
    ("mistral", {"sliding_window": -4}, "sliding_window.*-4"),
    ("ministral3", {"sliding_window": 0}, "sliding_window must be a whole number"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number"),
    ("exaone4", {"sliding_window_pattern": "LX"}, "must be of letters L and G, got 'LX'"),
    ("qwen3_layers", {"layer_types": ["full_attention"]}, "3 layers"),
    ("gemma3", {"layer_types": ["full_attention"]}, "layer_types must be a list of 3 kinds"),
    ("qwen3_layers", {"use_sliding_window": False}, "no window"),
    ("smollm3", {"no_rope_layers": [1, 2, 1]}, "no_rope_layers must be 3 zeros or ones"),
    ("smollm3", {"no_rope_layers": 3}, "no_rope_layers must be 3 zeros or ones, got 3"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "must be a whole number"),
    # Rope.
    ("llama2", {"rope_scaling": {"rope_type": "dynamic"}},
     "'dynamic'; supported: default, linear, llama3, yarn, longrope"),
    ("llama2", {"rope_scaling": {"type": "linear"}}, "linear lacks the field factor"),
    ("phi3", {"partial_rotary_factor": 0}, "must be above 0"),
    ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope kind longrope lacks the field short_"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0]}},
     "short_factor must be 8 numbers above 0"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1]}},
     "short_factor is of the rope kind longrope"),
    ("olmo3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "factor": "32"}},
     "settings of rope must be numbers, got"),
    ("ministral3", {"rope_parameters": {"type": "yarn", "llama_4_scaling_beta": -1}},
     "original_max_position_embeddings"),
    ("smollm3", {"rope_parameters": ROPES}, "rope_parameters that differ between layers"),
    # Settings of one family.
    ("granite", {"logits_scaling": 0}, "logits_scaling must be a positive number, got 0"),
    ("cohere2", {"logit_scale": 0}, "logit_scale must be a positive number, got 0"),
    ("cohere2", {"order_of_interleaved_layers": "global_attn_first"}, "must be 'local"),
    ("neox", {"use_parallel_residual": 1}, "use_parallel_residual must be true or false"),
    ("mpt", {"attn_config": {"alibi": False}}, "alibi must be true, got false"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln must be False, got True"),
    ("mpt", {"attn_config": {"softmax_scale": 0}}, "softmax_scale must be a positive number"),
    ("mpt", {"attn_config": 3}, "attn_config must be an object, got 3"),
    ("mpt", {"expansion_ratio": "4"}, "intermediate_size"),
    ("mpt", {"norm_type": "rmsnorm"}, "norm_type must be 'low_precision_layernorm'"),
    ("falcon7b", {"num_ln_in_parallel_attn": 2}, "must be 1 without new_decoder_architecture"),
    ("mixtral", {"num_experts_per_tok": 5}, "must be at most num_local_experts, 4, got 5"),
    ("qwen3_moe", {"mlp_only_layers": [7]}, "mlp_only_layers must be numbers of layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number"),
    ("olmoe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
    ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha must be 1.702"),
    # Settings that contradict the family or each other.
    ("llama2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must be"),
    ("llama2", {"use_sliding_window": True}, "use_sliding_window must be False"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types must be"),
    ("mistral", {"use_sliding_window": False}, "use_sliding_window must be True"),
    ("llama2", {"use_qk_norm": True}, "use_qk_norm must be False"),
    ("qwen3", {"use_qk_norm": False}, "use_qk_norm must be True"),
    ("llama2", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers must be"),
    ("llama2", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta has two"),
    ("llama2", {"rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "factor has two"),
    ("llama2", {"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "rope_type has two"),
    ("llama2", {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "partial_rot"),
    ("llama2", {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
     "llama_4_scaling_beta must be absent"),
    ("mpt", {"hidden_size": 32}, "d_model and hidden_size are one setting, got 64 and 32"),
    ("gpt_oss", {"experts_per_token": 4}, "are one setting, got 4 and 2"),
    # Unknown fields of the computation.
    ("llama3", {"depth_scale": 2.0}, "unknown field depth_scale"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 512}, "unknown field shared_expert"),
    ("mpt", {"attn_config": {"attn_logit_softcapping": 20}}, "attn_logit_softcapping.* must be"),
    ("mpt", {"attn_config": {"qk_gn": True, "rope": True}}, "unknown field rope"),
    ("gemma2", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "rope_gain": 2.0}},
     "unknown field rope_gain"),
]  # fmt: skip


@pytest.mark.parametrize("model, change, message", REFUSED)
def test_unsupported_configs_are_refused(model, change, message, tmp_path):
    fields = {name: v for name, v in (FAMILIES[model] | change).items() if v is not ABSENT}
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path, fields)
    assert str(tmp_path / "config.json") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not valid JSON"), (b'{"a": "\xff"}', "not valid JSON"), (b"[]", "JSON object")],
)
def test_invalid_json_is_refused(content, message, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match=re.escape(f"no config.json in {tmp_path}")):
        read_config(tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("name", FAMILIES)
def test_agrees_with_transformers(name, tmp_path):
    """Shapes by name, windows and ids equal those of transformers for the same config.json."""
    import transformers
    from torch import device

    config = read(tmp_path, FAMILIES[name])
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    with device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(reference)
    expected = {n: tuple(p.shape) for n, p in model.named_parameters()}
    head = {"embed_out.weight": "lm_head.weight"}  # older files of GPT-NeoX have the first name
    stored = {head.get(name, name): shape for name, shape in stored_shapes(config).values()}
    if config.experts and config.family != "gpt_oss":  # transformers joins the experts it reads
        stored = {n.replace("block_sparse_moe", "mlp"): s for n, s in stored.items()}
        stored, expected = (
            {n: s for n, s in shapes.items() if ".experts." not in n}
            for shapes in (stored, expected)
        )
    assert stored == expected
    base = model.base_model
    layers = next(getattr(base, n) for n in ("layers", "blocks", "h") if hasattr(base, n))
    windows = tuple(
        getattr(getattr(layer, "self_attn", layer), "sliding_window", None) for layer in layers
    )
    if config.family in ("mistral", "phi3", "ministral3", "mixtral"):
        windows = (reference.sliding_window,) * config.layers
    elif config.family == "exaone4":
        kinds = reference.layer_types
        windows = tuple(reference.sliding_window if kind[0] == "s" else None for kind in kinds)
    assert config.windows == windows
    if (
        "linear" not in name and "longrope" not in name
    ):  # test_known_fields.py has the contexts of scaled positions
        context = "max_seq_len" if config.family == "mpt" else "max_position_embeddings"
        assert config.context == getattr(reference, context)
    names = "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"
    assert config.norm_eps == next(getattr(reference, n) for n in names if hasattr(reference, n))
