"""gpt-oss (OpenAI): experts with biases and a clamped MLP, windows, a learned sink per head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import (
    Family,
    Fields,
    FusedPart,
    GgufForm,
    alternating,
    or_rope,
    windows_of,
)
from jaxkv.models.loading.families.mixture import LOCAL_COUNTS, experts
from jaxkv.models.loading.field_values import positive

ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """Every second layer has a window."""
    return experts(fields, where, "num_local_experts", "intermediate_size") | {
        "windows": windows_of(fields, where, alternating(fields, 2)),
        "mlp_bias": True,
        "clamp": positive(fields, "swiglu_limit", where),
        "sink_logit": "learned",
    }


def gate_up(kind: str, rows: str, stored: str, axis: int, transposed: bool) -> dict[str, FusedPart]:
    """Gate and up, column beside column. kind: the end of our names and of the stored ones."""
    return {
        f"expert_{part}{kind}": FusedPart(
            f"mlp.experts.gate_up_proj{kind}", rows, axis, str(i), str(i + 1), stored, transposed
        )
        for i, part in enumerate(("gate", "up"))
    }


GPT_OSS = Family(
    "gpt_oss",
    ("GptOssForCausalLM", "GptOssModel"),
    switches,
    defaults={
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "sliding_window": 128, "num_local_experts": 128,
        "num_experts_per_tok": 4, "attention_bias": True, "swiglu_limit": 7.0,
        "torch_dtype": "bfloat16",
    },
    applied=frozenset({
        "attention_bias", "sliding_window", "layer_types", "num_local_experts",
        "num_experts_per_tok", "initial_context_length", "swiglu_limit",
        "quantization_config",
    }),
    renamed={"experts_per_token": "num_experts_per_tok"},
    derived=or_rope(ROPE),
    packed="mxfp4",
    names={"router": "mlp.router.weight", "router_bias": "mlp.router.bias",
           "expert_down_bias": "mlp.experts.down_proj_bias"},
    fused=gate_up("", "E D M 2", "E D 2M", 3, True)
    | gate_up("_bias", "E M 2", "E 2M", 2, False)
    | {"expert_down": FusedPart("mlp.experts.down_proj", "E M D", 0, "0", "E", "E M D", True)},
    gguf=GgufForm(
        "gpt-oss",
        LOCAL_COUNTS | {"intermediate_size": "expert_feed_forward_length"},
        lambda fields: {"rope_scaling": {**fields["rope_scaling"], "truncate": False}},
        windowed=True,
        names={"mlp_norm": "post_attention_norm.weight", "sink_logits": "attn_sinks.weight"},
    ),
)  # fmt: skip
