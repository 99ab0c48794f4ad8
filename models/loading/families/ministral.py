"""Ministral 3 (Mistral AI), text: Mistral whose queries grow with the position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import Family, Fields, GgufForm, one_window, or_rope
from jaxkv.models.loading.field_values import integer, positive

ROPE = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
    "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """The growth of queries, and one window for all layers, if there is any."""
    rope = fields.get("rope_parameters") or fields["rope_scaling"]
    growth = None
    if rope.get("llama_4_scaling_beta") is not None:
        length = integer(rope, "original_max_position_embeddings", where)
        growth = positive(rope, "llama_4_scaling_beta", where), length
    return {"query_growth": growth, "windows": one_window(fields, where)}


def constants(fields: Fields) -> dict[str, Any]:
    """Rope settings with the growth of queries and the factor of YaRN's temperature."""
    rope = {"rope_type": "default"} | fields["rope_scaling"]
    if "growth" in fields:
        rope["llama_4_scaling_beta"] = fields["growth"]
    if "mscale" in fields:
        rope |= {"mscale": fields["mscale"], "mscale_all_dim": fields["mscale"]}
    return {"rope_scaling": rope}


MINISTRAL3 = Family(
    "ministral3",
    ("Ministral3ForCausalLM", "Ministral3Model"),
    switches,
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    },
    derived=or_rope(ROPE),
    gguf=GgufForm(
        "mistral3",
        {"growth": "attention.temperature_scale", "mscale": "rope.scaling.yarn_log_multiplier"},
        constants,
        paired_rows=True,
    ),
    applied=frozenset({"sliding_window", "llama_4_scaling_beta"}),
)  # fmt: skip
