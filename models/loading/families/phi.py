"""Phi-3 and Phi-4-mini (Microsoft): fused projections; in the latter, partial rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import GATE_UP, Family, Fields, FusedPart, GgufForm
from jaxkv.models.loading.field_values import integer


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """All layers have one window, if there is any."""
    window = fields["sliding_window"]
    window = None if window is None else integer(fields, "sliding_window", where)
    return {"windows": (window,) * fields["num_hidden_layers"]}


def qkv(name: str) -> dict[str, FusedPart]:
    """Queries, keys and values, one after another."""
    return {
        "q": FusedPart(name, "NH+2KH", 0, "0", "NH"),
        "k": FusedPart(name, "NH+2KH", 0, "NH", "NH+KH"),
        "v": FusedPart(name, "NH+2KH", 0, "NH+KH", "NH+2KH"),
    }


def constants(fields: Fields) -> dict[str, Any]:
    """The part that rotates, from its number of dims, and no window where it is 0."""
    head_dim = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
    rotated = fields.get("rotary_dim") or head_dim
    return {
        "partial_rotary_factor": rotated / head_dim,
        "sliding_window": fields["sliding_window"] or None,
    }


PHI3 = Family(
    "phi3",
    ("Phi3ForCausalLM", "Phi3Model"),
    switches,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1,
              "eos_token_id": 32000},
    applied=frozenset({"sliding_window", "partial_rotary_factor"}),
    fused=qkv("self_attn.qkv_proj.weight") | GATE_UP,
    gguf=GgufForm(
        "phi3",
        {"rotary_dim": "rope.dimension_count"},
        constants,
        fused=qkv("attn_qkv.weight")
        | {name: part._replace(name="ffn_up.weight") for name, part in GATE_UP.items()},
    ),
)  # fmt: skip
