"""EXAONE 4 (LG AI Research): norms after attention and MLP; windows, and full layers unrotated."""

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
from jaxkv.models.loading.field_values import integer


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """If any layer may have a window, those without one do not rotate."""
    windows = windows_of(fields, where, kinds(fields, where))
    return {
        "norm_place": "after",
        "qk_norm": "head",
        "windows": windows,
        "rotated_layers": tuple(
            fields["sliding_window"] is None or window is not None for window in windows
        ),
    }


def kinds(fields: Fields, where: Path) -> list[str]:
    """The kind of each layer: full after so many windows, or by letters L and G."""
    pattern, count = fields["sliding_window_pattern"], fields["num_hidden_layers"]
    if fields["sliding_window"] is None:
        return ["full_attention"] * count
    if not isinstance(pattern, str):
        return alternating(fields, integer(fields, "sliding_window_pattern", where))
    if not pattern or {*pattern} - {"L", "G"}:
        raise ValueError(f"sliding_window_pattern must be of letters L and G, got {pattern!r:.60}")
    local = [pattern[i % len(pattern)] == "L" and i < count - 1 for i in range(count)]
    return ["sliding_attention" if windowed else "full_attention" for windowed in local]


EXAONE4 = Family(
    "exaone4",
    ("Exaone4ForCausalLM", "Exaone4Model"),
    switches,
    defaults={
        "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "bos_token_id": 0, "eos_token_id": 2, "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    applied=frozenset({"sliding_window", "sliding_window_pattern", "layer_types"}),
    names=POST_NORMS,
    gguf=GgufForm("exaone4", pattern=True, windowed=True),
)  # fmt: skip
