"""Phi-3 and Phi-4-mini (Microsoft): fused projections; in the latter, partial rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import (
    GATE_UP,
    Family,
    Fields,
    FusedPart,
    GgufForm,
    one_window,
)


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """All layers have one window, if there is any."""
    return {"windows": one_window(fields, where)}


def qkv(name: str) -> dict[str, FusedPart]:
    """Queries, keys and values, one after another."""
    return {
        "q": FusedPart(name, "NH+2KH", 0, "0", "NH"),
        "k": FusedPart(name, "NH+2KH", 0, "NH", "NH+KH"),
        "v": FusedPart(name, "NH+2KH", 0, "NH+KH", "NH+2KH"),
    }


def constants(fields: Fields) -> dict[str, Any]:
    """The part that rotates, from its number of dims, and no window where it is 0."""
    heads = max(1, fields["num_attention_heads"])
    head_dim = fields["head_dim"] or fields["hidden_size"] // heads
    rotated = fields.get("rotary_dim")
    whole = isinstance(rotated, int) and rotated > 0
    return {
        "partial_rotary_factor": rotated / max(1, head_dim) if whole else 1,
        "sliding_window": fields["sliding_window"] or None,
    }


def derived(fields: Fields) -> dict[str, Any]:
    """LongRoPE by its other names, which are those of rope settings with factors."""
    rope = fields.get("rope_scaling")
    if isinstance(rope, dict) and "short_factor" in rope:
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("su", "yarn"):
            settings = {name: value for name, value in rope.items() if name != "type"}
            return {"rope_scaling": settings | {"rope_type": "longrope"}}
    return {}


PHI3 = Family(
    "phi3",
    ("Phi3ForCausalLM", "Phi3Model"),
    switches,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1,
              "eos_token_id": 32000},
    applied=frozenset({"sliding_window", "partial_rotary_factor"}),
    # Of phi3, as transformers reads them; and fields of published files that its code ignores.
    derived=derived,
    neutral={"full_attn_mod": (1,), "interpolate_factor": (1,), "embd_pdrop": (0,),
             "resid_pdrop": (0,)},
    fused=qkv("self_attn.qkv_proj.weight") | GATE_UP,
    gguf=GgufForm(
        "phi3",
        {"rotary_dim": "rope.dimension_count"},
        constants,
        windowed=True,
        fused=qkv("attn_qkv.weight")
        | {name: part._replace(name="ffn_up.weight") for name, part in GATE_UP.items()},
    ),
)  # fmt: skip
