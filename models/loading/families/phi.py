"""Phi-3 and Phi-4-mini (Microsoft): fused projections; in the latter, partial rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import GATE_UP, Family, Fields, FusedPart
from jaxkv.models.loading.field_values import integer


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """All layers have one window, if there is any."""
    window = fields["sliding_window"]
    window = None if window is None else integer(fields, "sliding_window", where)
    return {"windows": (window,) * fields["num_hidden_layers"]}


QKV = "self_attn.qkv_proj.weight"
PHI3 = Family(
    "phi3",
    ("Phi3ForCausalLM", "Phi3Model"),
    switches,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1,
              "eos_token_id": 32000},
    applied=frozenset({"sliding_window", "partial_rotary_factor"}),
    fused={
        "q": FusedPart(QKV, "NH+2KH", 0, "0", "NH"),
        "k": FusedPart(QKV, "NH+2KH", 0, "NH", "NH+KH"),
        "v": FusedPart(QKV, "NH+2KH", 0, "NH+KH", "NH+2KH"),
    }
    | GATE_UP,
)  # fmt: skip
