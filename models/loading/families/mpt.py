"""MPT (MosaicML): LayerNorm without biases, a plain MLP, ALiBi."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.models.loading.families.family import (
    LAYER_NORM,
    Family,
    Fields,
    GgufForm,
    contiguous_qkv,
)
from jaxkv.models.loading.field_values import boolean, positive
from jaxkv.rotary import Alibi

APPLIED = "alibi", "alibi_bias_max", "clip_qkv", "softmax_scale"
NEUTRAL = {
    "attn_type": ("multihead_attention",), "attn_impl": ("torch", "flash", "triton"),
    "attn_pdrop": (0,), "prefix_lm": (False,), "qk_ln": (False,), "sliding_window_size": (-1,),
    "attn_uses_sequence_id": (False,),
}  # fmt: skip


def derived(fields: Fields) -> dict[str, Any]:
    """The settings of attention, which are an object of their own, and the width of the MLP."""
    width, ratio = fields.get("hidden_size"), fields.get("expansion_ratio", 4)
    attention = fields.get("attn_config") or {}
    flat = dict(attention) if isinstance(attention, dict) else {}
    if isinstance(width, int) and isinstance(ratio, int):
        flat["intermediate_size"] = ratio * width
    return flat


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """No matrix has a bias."""
    if not isinstance(fields.get("attn_config") or {}, dict):
        raise ValueError(f"attn_config must be an object, got {fields['attn_config']!r:.60}")
    if not boolean(fields, "alibi", where):
        raise ValueError("alibi must be true, got false")
    clip, scale = (
        None if fields[name] is None else positive(fields, name, where)
        for name in ("clip_qkv", "softmax_scale")
    )
    max_bias = positive(fields, "alibi_bias_max", where)
    return {
        "encoding": Alibi.of(fields["num_attention_heads"], max_bias),
        "norm": "layer",
        "activation": "gelu",
        "gated": False,
        "clip_qkv": clip,
        "scale": scale,
    }


MPT = Family(
    "mpt",
    ("MptForCausalLM", "MPTForCausalLM", "MptModel"),
    switches,
    defaults={
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "softmax_scale": None,
    },
    applied=frozenset({"attn_config", "expansion_ratio", *APPLIED}),
    neutral=NEUTRAL
    | {
        "no_bias": (True,), "norm_type": ("low_precision_layernorm", "layernorm"),
        "learned_pos_emb": (True, False), "embedding_fraction": (1,), "init_device":
        ("cpu", "meta", "mixed"), "emb_pdrop": (0,), "resid_pdrop": (0,), "verbose": (0,),
    },
    renamed={"d_model": "hidden_size", "n_heads": "num_attention_heads",
             "n_layers": "num_hidden_layers", "max_seq_len": "max_position_embeddings",
             "layer_norm_epsilon": "rms_norm_eps"},
    derived=derived,
    layers="transformer.blocks.",
    names={
        "embed": "transformer.wte.weight", "norm": "transformer.norm_f.weight",
        "attn_norm": "norm_1.weight", "mlp_norm": "norm_2.weight", "o": "attn.out_proj.weight",
        "up": "ffn.up_proj.weight", "down": "ffn.down_proj.weight",
    },
    fused=contiguous_qkv("attn.Wqkv"),
    gguf=GgufForm(
        "mpt",
        LAYER_NORM
        | {"clip_qkv": "attention.clamp_kqv", "alibi_bias_max": "attention.max_alibi_bias"},
        lambda fields: {"clip_qkv": fields.get("clip_qkv") or None},
        fused=contiguous_qkv("attn_qkv"),
    ),
)  # fmt: skip
