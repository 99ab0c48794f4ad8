"""OLMo 2 and 3 (AI2): norms after attention and MLP, and of whole queries and keys; 3: windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import (
    POST_NORMS,
    Family,
    Fields,
    GgufForm,
    alternating,
    windows_of,
)


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """The places of the norms."""
    return {"norm_place": "after", "qk_norm": "whole"}


THETA = 500000.0


def switches_of_olmo3(fields: Fields, where: Path) -> dict[str, Any]:
    """Three of four layers have a window, and rotate without scaling."""
    rope = fields.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or fields.get("rope_theta") or THETA
    return switches(fields, where) | {
        "windows": windows_of(fields, where, alternating(fields, 4)),
        "window_rope": {"rope_theta": theta} | (fields.get("window_rope") or {}),
    }


DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
OLMO2 = Family(
    "olmo2",
    ("Olmo2ForCausalLM", "Olmo2Model"),
    switches,
    defaults=DEFAULTS,
    applied=frozenset({"attention_bias"}),
    names=POST_NORMS,
    gguf=GgufForm("olmo2"),
)
OLMO3 = Family(
    "olmo3",
    ("Olmo3ForCausalLM", "Olmo3Model"),
    switches_of_olmo3,
    defaults=DEFAULTS | {"sliding_window": 4096, "rope_theta": THETA},
    applied=frozenset({"attention_bias", "sliding_window", "layer_types"}),
    window_rope=True,
    names=POST_NORMS,
    gguf=GgufForm("olmo2", pattern=True, windowed=True),
)
