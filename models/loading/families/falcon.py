"""Falcon 7B, 40B and RW (TII): LayerNorm, a plain MLP, fused projections, rotation or ALiBi."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxkv.models.loading.families.family import (
    LAYER_NORM,
    Family,
    Fields,
    FusedPart,
    GgufForm,
    activation,
    contiguous_qkv,
)
from jaxkv.models.loading.field_values import boolean
from jaxkv.models.network.config import Config
from jaxkv.rotary import Alibi


def derived(fields: Fields) -> dict[str, Any]:
    """The widths that follow from others."""
    heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
    if fields.get("new_decoder_architecture"):
        kv_heads = fields.get("num_kv_heads")
    else:
        kv_heads = 1 if fields.get("multi_query", True) else heads
    mlp = fields.get("ffn_hidden_size")
    if mlp is None and isinstance(width, int):
        mlp = 4 * width
    return {"num_key_value_heads": kv_heads, "intermediate_size": mlp, "head_dim": None}


def switches(fields: Fields, where: Path) -> dict[str, Any]:
    """The 40B form has a norm for attention and another for the MLP, both of the layer's input."""
    new_form = boolean(fields, "new_decoder_architecture", where)
    norms = fields["num_ln_in_parallel_attn"]
    norms = (2 if new_form else 1) if norms is None else norms
    if norms not in (1, 2) or (norms == 2 and not new_form):
        allowed = "1 or 2" if new_form else "1 without new_decoder_architecture"
        raise ValueError(f"num_ln_in_parallel_attn must be {allowed}, got {norms!r}")
    parallel = new_form or boolean(fields, "parallel_attn", where)
    bias = boolean(fields, "bias", where)
    changes = {
        "norm": "layer",
        "norm_bias": True,
        "activation": activation(fields, "activation"),
        "gated": False,
        "parallel": ("none" if not parallel else "separate" if norms == 2 else "shared"),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
    }
    if boolean(fields, "alibi", where):
        changes["encoding"] = scaled_alibi(fields["num_attention_heads"], fields["hidden_size"])
    return changes


def scaled_alibi(heads: int, width: int) -> Alibi:
    """Slopes in bfloat16, times the scale of attention, which applies to dot product and bias."""
    slopes = jnp.asarray(Alibi.of(heads).slopes, jnp.bfloat16).tolist()
    return Alibi(tuple(slope * (width // heads) ** -0.5 for slope in slopes))


def norm_names(attn: str, mlp: str) -> Callable[[Config], dict[str, str]]:
    """The norms of a block with two of them have names of their own, `attn` and `mlp`."""
    names = {
        f"{norm}{suffix}": f"{name}.{kind}"
        for norm, name in (("attn_norm", attn), ("mlp_norm", mlp))
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    }
    return lambda config: names if config.parallel == "separate" else {}


def gguf_constants(fields: Fields) -> dict[str, Any]:
    """The form, which files tell by their KV heads and norms. None has the form of RW."""
    kv_heads, second_norm = fields["num_key_value_heads"], fields["second_norm"]
    return {
        "new_decoder_architecture": second_norm or kv_heads != 1,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if second_norm else 1,
    }


def qkv(kind: str) -> dict[str, FusedPart]:
    """For each KV head its queries, its key and its value. kind: weight or bias."""
    name, suffix = f"self_attention.query_key_value.{kind}", "" if kind == "weight" else "_bias"
    ends = {"q": ("0", "G"), "k": ("G", "G+1"), "v": ("G+1", "G+2")}
    return {f"{part}{suffix}": FusedPart(name, "K G+2 H", 1, *ends[part]) for part in ends}


FALCON = Family(
    "falcon",
    ("FalconForCausalLM", "FalconModel"),
    switches,
    defaults={
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "activation": "gelu",
        "bos_token_id": 11, "eos_token_id": 11, "tie_word_embeddings": True, "alibi": False,
        "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True,
        "bias": False, "num_ln_in_parallel_attn": None,
    },
    applied=frozenset({"activation", "alibi", "new_decoder_architecture", "multi_query",
                       "parallel_attn", "bias", "num_ln_in_parallel_attn", "num_kv_heads",
                       "ffn_hidden_size"}),
    neutral={"ff_factor": (4,)},
    renamed={"layer_norm_epsilon": "rms_norm_eps"},
    derived=derived,
    layers="transformer.h.",
    names={
        "embed": "transformer.word_embeddings.weight", "norm": "transformer.ln_f.weight",
        "norm_bias": "transformer.ln_f.bias", 
        "o": "self_attention.dense.weight", "o_bias": "self_attention.dense.bias",
        "up": "mlp.dense_h_to_4h.weight", "up_bias": "mlp.dense_h_to_4h.bias",
        "down": "mlp.dense_4h_to_h.weight", "down_bias": "mlp.dense_4h_to_h.bias",
    },
    names_of=norm_names("ln_attn", "ln_mlp"),
    fused=qkv("weight") | qkv("bias"),
    gguf=GgufForm(
        "falcon",
        LAYER_NORM,
        gguf_constants,
        names_of=norm_names("attn_norm_2", "attn_norm"),
        fused=contiguous_qkv("attn_qkv"),
    ),
)  # fmt: skip
