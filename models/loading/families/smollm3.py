"""SmolLM3 (Hugging Face): Llama without rotation in every fourth layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import Family, Fields, GgufForm, windows_of
from jaxkv.models.loading.field_values import boolean, integer


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """Which layers rotate, and which have a window."""
    count = fields["num_hidden_layers"]
    interval = integer(fields, "no_rope_layer_interval", where)
    rotated = fields.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    if (
        not isinstance(rotated, list)
        or len(rotated) != count
        or any(x not in (0, 1) for x in rotated)
    ):
        raise ValueError(f"no_rope_layers must be {count} zeros or ones, got {rotated!r:.60}")
    windowed = (
        boolean(fields, "use_sliding_window", where) and fields.get("sliding_window") is not None
    )
    kinds = ["full_attention" if rotates or not windowed else "sliding_attention"
             for rotates in rotated]  # fmt: skip
    return {
        "rotated_layers": tuple(map(bool, rotated)),
        "windows": windows_of(fields, where, kinds),
    }


SMOLLM3 = Family(
    "smollm3",
    ("SmolLM3ForCausalLM", "SmolLM3Model"),
    switches,
    defaults={
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "bos_token_id": 128000,
        "eos_token_id": 128001, "no_rope_layer_interval": 4, "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
    applied=frozenset({"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval",
                       "layer_types", "sliding_window", "use_sliding_window",
                       "max_window_layers"}),
    gguf=GgufForm("smollm3", paired_rows=True),
)  # fmt: skip
