"""The weight map: our parameter names, Hugging Face's, and the shapes, as one table.

Weights keep Hugging Face's (out, in) orientation. In a shape a word is the product of its
letters: D width, F mlp, V vocabulary, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from math import prod

from jaxkv.models.network.config import Config

# our name, Hugging Face's name, shape, the field of Config that says whether it exists
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUTER = (
    ("embed", EMBED, "V D", ""),
    ("norm", "model.norm.weight", "D", ""),
    ("head", HEAD, "V D", "own_head"),
)
LAYER = (
    ("attn_norm", "input_layernorm.weight", "D", ""),
    ("q", "self_attn.q_proj.weight", "NH D", ""),
    ("k", "self_attn.k_proj.weight", "KH D", ""),
    ("v", "self_attn.v_proj.weight", "KH D", ""),
    ("o", "self_attn.o_proj.weight", "D NH", ""),
    ("q_bias", "self_attn.q_proj.bias", "NH", "qkv_bias"),
    ("k_bias", "self_attn.k_proj.bias", "KH", "qkv_bias"),
    ("v_bias", "self_attn.v_proj.bias", "KH", "qkv_bias"),
    ("o_bias", "self_attn.o_proj.bias", "D", "out_bias"),
    ("q_norm", "self_attn.q_norm.weight", "H", "qk_norm"),
    ("k_norm", "self_attn.k_norm.weight", "H", "qk_norm"),
    ("sinks", "self_attn.sinks", "N", "learned_sinks"),
    ("mlp_norm", "post_attention_layernorm.weight", "D", ""),
    ("gate", "mlp.gate_proj.weight", "F D", ""),
    ("up", "mlp.up_proj.weight", "F D", ""),
    ("down", "mlp.down_proj.weight", "D F", ""),
    ("gate_bias", "mlp.gate_proj.bias", "F", "mlp_bias"),
    ("up_bias", "mlp.up_proj.bias", "F", "mlp_bias"),
    ("down_bias", "mlp.down_proj.bias", "D", "mlp_bias"),
)
HEADS = {"lm_head.weight", "output.weight"}
# Buffers that old versions of transformers saved; they are computed from config.json.
HARMLESS = ("rotary_emb.inv_freq",)


def shapes(config: Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Our name of every parameter -> (Hugging Face's name, shape)."""
    sizes = {
        "D": config.width,
        "F": config.mlp,
        "V": config.vocab,
        "N": config.heads,
        "K": config.kv_heads,
        "H": config.head_dim,
    }
    entries = list(OUTER)
    for i in range(config.layers):
        prefix, hf_prefix = f"layers.{i}.", f"model.layers.{i}."
        entries += [(prefix + a, hf_prefix + b, shape, field) for a, b, shape, field in LAYER]
    return {
        name: (hf_name, tuple(prod(sizes[letter] for letter in word) for word in shape.split()))
        for name, hf_name, shape, field in entries
        if not field or getattr(config, field)
    }


def canonical(name: str) -> str:
    """The table's form of a name in a file: bare models lack `model.`, heads have two names."""
    bare = name.removeprefix("model.")
    return HEAD if bare in HEADS else "model." + bare
