"""Cohere 2 (Command R7B, A): LayerNorm without bias, a parallel block, windows, a logit scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import (
    LAYER_NORM,
    Family,
    Fields,
    GgufForm,
    alternating,
    windows_of,
)
from jaxkv.models.loading.field_values import integer, positive


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """Layers without a window do not rotate."""
    every = integer(fields, "sliding_window_pattern", where)
    windows = windows_of(fields, where, alternating(fields, every))
    return {
        "norm": "layer",
        "parallel": "shared",
        "logit_scale": positive(fields, "logit_scale", where),
        "windows": windows,
        "rotated_layers": tuple(window is not None for window in windows),
    }


COHERE2 = Family(
    "cohere2",
    ("Cohere2ForCausalLM", "Cohere2Model"),
    switches,
    defaults={
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "logit_scale": 0.0625,
        "bos_token_id": 5, "eos_token_id": 255001, "tie_word_embeddings": True,
        "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    applied=frozenset({"logit_scale", "attention_bias", "sliding_window", "sliding_window_pattern",
                       "layer_types"}),
    renamed={"layer_norm_eps": "rms_norm_eps"},
    neutral={
        "position_embedding_type": ("rope_gptj",), "order_of_interleaved_layers":
        ("local_attn_first",), "use_gated_activation": (True,), "use_parallel_block": (True,),
        "use_embedding_sharing": (True,), "layer_switch": (4,), "rotary_pct": (1,),
        "use_parallel_embedding": (True, False), "cache_implementation": ("hybrid",),
    },
    paired_rows=True,
    gguf=GgufForm("cohere2", LAYER_NORM | {"logit_scale": "logit_scale"}, paired_rows=True,
                  windowed=True),
)  # fmt: skip
