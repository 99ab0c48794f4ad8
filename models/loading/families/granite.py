"""Granite 3 (IBM): Llama with four multipliers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import Family, Fields, GgufForm
from jaxkv.models.loading.field_values import positive


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """The multipliers of embedding, residual stream, attention logits and logits."""
    return {
        "embedding_scale": positive(fields, "embedding_multiplier", where),
        "residual_scale": positive(fields, "residual_multiplier", where),
        "scale": positive(fields, "attention_multiplier", where),
        "logit_scale": 1 / positive(fields, "logits_scaling", where),
    }


MULTIPLIERS = {  # and their keys in GGUF files
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale",
}  # fmt: skip
GRANITE = Family(
    "granite",
    ("GraniteForCausalLM", "GraniteModel"),
    switches,
    defaults=dict.fromkeys(MULTIPLIERS, 1.0)
    | {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    applied=frozenset((*MULTIPLIERS, "attention_bias", "mlp_bias")),
    gguf=GgufForm("granite", MULTIPLIERS, paired_rows=True),
)
