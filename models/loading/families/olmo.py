"""OLMo 2 (AI2): norms after attention and MLP, and of whole queries and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import Family, Fields


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """The places of the norms."""
    return {"norm_place": "after", "qk_norm": "whole"}


OLMO2 = Family(
    "olmo2",
    ("Olmo2ForCausalLM", "Olmo2Model"),
    switches,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    applied=frozenset({"attention_bias"}),
    names={
        "attn_post_norm": "post_attention_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    },
)
