"""Mixtral (Mistral AI), Qwen3-MoE (Alibaba) and OLMoE (AI2): mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import Family, Fields, GgufForm, one_window
from jaxkv.models.loading.field_values import boolean, integer, positive


def experts(fields: Fields, where: Path, count: str, width: str) -> dict[str, Any]:
    """The switches of the experts; count, width: the fields that have these numbers."""
    number, chosen = integer(fields, count, where), integer(fields, "num_experts_per_tok", where)
    if chosen > number:
        raise ValueError(f"num_experts_per_tok must be at most {count}, {number}, got {chosen}")
    size = integer(fields, width, where)
    return {"experts": number, "experts_per_token": chosen, "expert_mlp": size}


def switches_of_mixtral(fields: Fields, where: Path) -> dict[str, Any]:
    """All layers have one window, if there is any."""
    return experts(fields, where, "num_local_experts", "intermediate_size") | {
        "windows": one_window(fields, where)
    }


def switches_of_qwen(fields: Fields, where: Path) -> dict[str, Any]:
    """Norms of queries and keys; some layers may have one MLP."""
    layers, step = fields["num_hidden_layers"], integer(fields, "decoder_sparse_step", where)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(i in range(layers) for i in dense):
        raise ValueError(f"mlp_only_layers must be numbers of layers, got {dense!r:.60}")
    windowed = boolean(fields, "use_sliding_window", where)
    return experts(fields, where, "num_experts", "moe_intermediate_size") | {
        "qk_norm": "head",
        "windows": one_window(fields, where) if windowed else (None,) * layers,
        "dense_layers": tuple(i for i in range(layers) if i in dense or (i + 1) % step),
        "normalised_experts": boolean(fields, "norm_topk_prob", where),
    }


def switches_of_olmoe(fields: Fields, where: Path) -> dict[str, Any]:
    """Norms of whole queries and keys."""
    clip = fields["clip_qkv"]
    return experts(fields, where, "num_experts", "intermediate_size") | {
        "qk_norm": "whole",
        "clip_qkv": None if clip is None else positive(fields, "clip_qkv", where),
        "normalised_experts": boolean(fields, "norm_topk_prob", where),
    }


COUNTS = {"num_experts_per_tok": "expert_used_count", "num_experts": "expert_count"}
LOCAL_COUNTS = {"num_experts_per_tok": "expert_used_count", "num_local_experts": "expert_count"}
MIXTRAL = Family(
    "mixtral",
    ("MixtralForCausalLM", "MixtralModel"),
    switches_of_mixtral,
    defaults={
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    applied=frozenset({"num_experts_per_tok", "num_local_experts", "sliding_window"}),
    names={
        "router": "block_sparse_moe.gate.weight",
        "expert_gate": "block_sparse_moe.experts.*.w1.weight",
        "expert_up": "block_sparse_moe.experts.*.w3.weight",
        "expert_down": "block_sparse_moe.experts.*.w2.weight",
    },
    gguf=GgufForm("llama", LOCAL_COUNTS, paired_rows=True),
)  # fmt: skip
QWEN3_MOE = Family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    switches_of_qwen,
    defaults={
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "sliding_window": 4096,
        "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
        "num_experts": 128, "norm_topk_prob": False,
    },
    applied=frozenset({
        "attention_bias", "use_sliding_window", "sliding_window", "max_window_layers",
        "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "num_experts_per_tok",
        "num_experts", "norm_topk_prob",
    }),
    renamed={"num_local_experts": "num_experts"},
    gguf=GgufForm(
        "qwen3moe",
        COUNTS | {"moe_intermediate_size": "expert_feed_forward_length"},
        lambda fields: {"norm_topk_prob": True},
    ),
)  # fmt: skip
OLMOE = Family(
    "olmoe",
    ("OlmoeForCausalLM", "OlmoeModel"),
    switches_of_olmoe,
    defaults={
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 50279,
        "clip_qkv": None, "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False,
    },
    applied=frozenset({"attention_bias", "clip_qkv", "num_experts_per_tok", "num_experts",
                       "norm_topk_prob"}),
    renamed={"num_local_experts": "num_experts"},
    gguf=GgufForm("olmoe", COUNTS),
)  # fmt: skip
