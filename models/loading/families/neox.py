"""GPT-NeoX and Pythia (EleutherAI): LayerNorm, a plain MLP, a parallel residual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import (
    LAYER_NORM,
    ROTATED,
    Family,
    Fields,
    FusedPart,
    GgufForm,
    activation,
    contiguous_qkv,
    rotated_part,
)
from jaxkv.models.loading.field_values import boolean


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """Every matrix has a bias, but for those of attention by `attention_bias`."""
    return {
        "kv_heads": fields["num_attention_heads"],
        "norm": "layer",
        "norm_bias": True,
        "activation": activation(fields),
        "gated": False,
        "parallel": "separate" if boolean(fields, "use_parallel_residual", where) else "none",
        "mlp_bias": True,
    }


def qkv(kind: str) -> dict[str, FusedPart]:
    """Queries, keys and values, side by side in each head. kind: weight or bias."""
    name = f"attention.query_key_value.{kind}"
    suffix = "" if kind == "weight" else "_bias"
    return {
        f"{part}{suffix}": FusedPart(name, "N 3 H", 1, str(at), str(at + 1))
        for at, part in enumerate("qkv")
    }


NEOX = Family(
    "gpt_neox",
    ("GPTNeoXForCausalLM", "GPTNeoXModel"),
    switches,
    defaults={
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "gelu",
        "bos_token_id": 0, "eos_token_id": 2, "attention_bias": True, "partial_rotary_factor": 0.25,
        "use_parallel_residual": True,
    },
    applied=frozenset({"attention_bias", "use_parallel_residual"}),
    renamed={"layer_norm_eps": "rms_norm_eps", "rotary_emb_base": "rope_theta",
             "rotary_pct": "partial_rotary_factor"},
    layers="gpt_neox.layers.",
    names={
        "embed": "gpt_neox.embed_in.weight", "norm": "gpt_neox.final_layer_norm.weight",
        "norm_bias": "gpt_neox.final_layer_norm.bias", "head": "embed_out.weight",
        "o": "attention.dense.weight", "o_bias": "attention.dense.bias",
        "up": "mlp.dense_h_to_4h.weight", "up_bias": "mlp.dense_h_to_4h.bias",
        "down": "mlp.dense_4h_to_h.weight", "down_bias": "mlp.dense_4h_to_h.bias",
    },
    fused=qkv("weight") | qkv("bias"),
    gguf=GgufForm(
        "gptneox",
        LAYER_NORM | ROTATED | {"use_parallel_residual": "use_parallel_residual"},
        lambda fields: {"partial_rotary_factor": rotated_part(fields), "attention_bias": True},
        fused=contiguous_qkv("attn_qkv") | contiguous_qkv("attn_qkv", "bias"),
    ),
)  # fmt: skip
