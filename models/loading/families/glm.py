"""GLM-4 9B (Z.ai): biases of queries, keys and values, half of each head rotated in neighbours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import (
    FUSED_UP,
    GATE_UP,
    ROTATED,
    Family,
    Fields,
    GgufForm,
    rotated_part,
)
from jaxkv.models.loading.field_values import boolean


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """The biases: the output projection has none."""
    return {"qkv_bias": boolean(fields, "attention_bias", where), "out_bias": False}


GGUF = GgufForm(
    "chatglm",
    ROTATED,
    lambda fields: {"partial_rotary_factor": rotated_part(fields)},
    fused=FUSED_UP,
    paired_rows=True,
)
GLM = Family(
    "glm",
    ("GlmForCausalLM", "GlmModel"),
    switches,
    defaults={
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
    applied=frozenset({"attention_bias", "partial_rotary_factor"}),
    fused=GATE_UP,
    paired_rows=True,
    gguf=GGUF,
)  # fmt: skip


def switches_of_glm4(fields: Fields, where: Path) -> dict[str, Any]:
    """Norms before and after attention and MLP."""
    return switches(fields, where) | {"norm_place": "both"}


GLM4 = replace(
    GLM,
    name="glm4",
    architectures=("Glm4ForCausalLM", "Glm4Model"),
    switches=switches_of_glm4,
    names={
        "attn_post_norm": "post_self_attn_layernorm.weight",
        "mlp_post_norm": "post_mlp_layernorm.weight",
    },
    gguf=replace(GGUF, name="glm4"),
)
