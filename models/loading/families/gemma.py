"""Gemma 2 and 3 (Google), text: norms of 1 + w before and after, windows, soft caps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import (
    POST_NORMS,
    Family,
    Fields,
    GgufForm,
    activation,
    alternating,
    windows_of,
)
from jaxkv.models.loading.field_values import integer, positive

NAMES = POST_NORMS | {"mlp_norm": "pre_feedforward_layernorm.weight"}
APPLIED = frozenset({
    "attention_bias", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types",
    "attn_logit_softcapping", "final_logit_softcapping",
})  # fmt: skip
DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 8192, "bos_token_id": 2,
    "eos_token_id": 1, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip


def switches(fields: Fields, where: Path, every: int = 2) -> dict[str, Any]:
    """What both generations have. every: one of so many layers has full attention."""
    softcap, logit_softcap = (
        positive(fields, name, where) if fields.get(name) else None
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    return {
        "norm": "rms_plus_one",
        "norm_place": "both",
        "activation": activation(fields, "hidden_activation"),
        "scale": positive(fields, "query_pre_attn_scalar", where) ** -0.5,
        "softcap": softcap,
        "logit_softcap": logit_softcap,
        "embedding_scale": float(fields["hidden_size"]) ** 0.5,
        "windows": windows_of(fields, where, alternating(fields, every)),
    }


def constants(fields: Fields) -> dict[str, Any]:
    """llama.cpp scales attention by the head dim, but in the 27B models by width over heads."""
    largest = {46, 62}  # layers
    by_width = fields["hidden_size"] // max(1, fields["num_attention_heads"])
    scaled_by = fields["head_dim"]
    if scaled_by is None or fields["num_hidden_layers"] in largest:
        scaled_by = by_width
    return {"query_pre_attn_scalar": scaled_by, "hidden_activation": "gelu_pytorch_tanh"}


SOFT_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping",
             "final_logit_softcapping": "final_logit_softcapping"}  # fmt: skip
GEMMA2 = Family(
    "gemma2",
    ("Gemma2ForCausalLM", "Gemma2Model"),
    switches,
    defaults=DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    applied=APPLIED,
    names=NAMES,
    overflows=True,
    gguf=GgufForm("gemma2", SOFT_CAPS, constants, raised_norms=True, windowed=True),
)


def switches_of_gemma3(fields: Fields, where: Path) -> dict[str, Any]:
    """Norms of queries and keys; layers with a window have a theta of their own."""
    changes = switches(fields, where, integer(fields, "sliding_window_pattern", where))
    local = fields.get("window_rope") or {"rope_theta": fields["rope_local_base_freq"]}
    context = integer(fields, "max_position_embeddings", where)  # after its scaling
    return changes | {"qk_norm": "head", "window_rope": local, "context": context}


GEMMA3 = Family(
    "gemma3_text",
    ("Gemma3ForCausalLM", "Gemma3TextModel"),
    switches_of_gemma3,
    defaults=DEFAULTS
    | {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "max_position_embeddings": 131072,
        "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
    },
    # transformers computes no cap of attention here.
    applied=APPLIED - {"attn_logit_softcapping"}
    | {"sliding_window_pattern", "rope_local_base_freq"},
    renamed={"_sliding_window_pattern": "sliding_window_pattern"},
    window_rope=True,
    names=NAMES,
    overflows=True,
    gguf=GgufForm(
        "gemma3",
        {"final_logit_softcapping": "final_logit_softcapping",
         "rope_local_base_freq": "rope.freq_base_swa"},
        constants,
        raised_norms=True,
        pattern=True,
        windowed=True,
    ),
)  # fmt: skip
