"""Phi-3 and Phi-4-mini (Microsoft): fused projections; in the latter, partial rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import (
    FUSED_UP,
    GATE_UP,
    ROTATED,
    Family,
    Fields,
    GgufForm,
    contiguous_qkv,
    one_window,
    rotated_part,
)


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """All layers have one window, if there is any."""
    return {"windows": one_window(fields, where)}


def constants(fields: Fields) -> dict[str, Any]:
    """The part that rotates, and no window where it is 0."""
    return {
        "partial_rotary_factor": rotated_part(fields),
        "sliding_window": fields["sliding_window"] or None,
    }


def derived(fields: Fields) -> dict[str, Any]:
    """LongRoPE under the name of YaRN, by which old files with factors mean it."""
    rope = fields.get("rope_scaling")
    if not isinstance(rope, dict) or "short_factor" not in rope:
        return {}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return {}
    settings = {name: value for name, value in rope.items() if name != "type"}
    return {"rope_scaling": settings | {"rope_type": "longrope"}}


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
    fused=contiguous_qkv("self_attn.qkv_proj") | GATE_UP,
    gguf=GgufForm(
        "phi3",
        ROTATED,
        constants,
        windowed=True,
        long_rope=True,
        fused=contiguous_qkv("attn_qkv") | FUSED_UP,
    ),
)  # fmt: skip
