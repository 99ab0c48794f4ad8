"""The weight map: our parameter names, those in safetensors and GGUF files, and shapes, as a table.

Weights keep Hugging Face's (out, in) orientation; a GGUF file stores a shape in reverse order. In a
shape a word is the product of its letters: D width, F mlp, V vocabulary, N query heads, K kv heads,
H head dim.
"""

from __future__ import annotations

from math import prod

from jaxkv.models.network.config import Config

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GGUF_EMBED, GGUF_HEAD = "token_embd.weight", "output.weight"
# our name, Hugging Face's, that in GGUF files, shape, the field of Config that says if it exists
OUTER = (
    ("embed", EMBED, GGUF_EMBED, "V D", ""),
    ("norm", "model.norm.weight", "output_norm.weight", "D", ""),
    ("head", HEAD, GGUF_HEAD, "V D", "untied_head"),
)
LAYER = (
    ("attn_norm", "input_layernorm.weight", "attn_norm.weight", "D", ""),
    ("q", "self_attn.q_proj.weight", "attn_q.weight", "NH D", ""),
    ("k", "self_attn.k_proj.weight", "attn_k.weight", "KH D", ""),
    ("v", "self_attn.v_proj.weight", "attn_v.weight", "KH D", ""),
    ("o", "self_attn.o_proj.weight", "attn_output.weight", "D NH", ""),
    ("q_bias", "self_attn.q_proj.bias", "attn_q.bias", "NH", "qkv_bias"),
    ("k_bias", "self_attn.k_proj.bias", "attn_k.bias", "KH", "qkv_bias"),
    ("v_bias", "self_attn.v_proj.bias", "attn_v.bias", "KH", "qkv_bias"),
    ("o_bias", "self_attn.o_proj.bias", "attn_output.bias", "D", "out_bias"),
    ("q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", "H", "qk_norm"),
    ("k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", "H", "qk_norm"),
    ("sink_logits", "self_attn.sinks", "", "N", "learned_sinks"),
    ("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight", "D", ""),
    ("gate", "mlp.gate_proj.weight", "ffn_gate.weight", "F D", ""),
    ("up", "mlp.up_proj.weight", "ffn_up.weight", "F D", ""),
    ("down", "mlp.down_proj.weight", "ffn_down.weight", "D F", ""),
    ("gate_bias", "mlp.gate_proj.bias", "ffn_gate.bias", "F", "mlp_bias"),
    ("up_bias", "mlp.up_proj.bias", "ffn_up.bias", "F", "mlp_bias"),
    ("down_bias", "mlp.down_proj.bias", "ffn_down.bias", "D", "mlp_bias"),
)
HEADS = {"lm_head.weight", "output.weight"}
# Buffers that old versions of transformers saved; they are computed from config.json.
HARMLESS = ("rotary_emb.inv_freq",)
ROPE_FACTORS = "rope_freqs.weight"  # a tensor of GGUF files that is read with the config
# Architectures whose query and key rows are stored in GGUF files with each head's rotary pairs side
# by side, (0, H/2, 1, H/2 + 1, ...), and the field of Config that counts the heads of a parameter.
PAIRED_ROWS = {"llama", "mistral"}
PAIRED = {"q": "heads", "q_bias": "heads", "k": "kv_heads", "k_bias": "kv_heads"}

NamedShapes = dict[str, tuple[str, tuple[int, ...]]]


def shapes(config: Config) -> NamedShapes:
    """Our name of every parameter -> (Hugging Face's name, shape)."""
    return {name: (hf_name, shape) for name, hf_name, _, shape in _parameters(config)}


def gguf_shapes(config: Config) -> NamedShapes:
    """Our name of every parameter -> (its name in a GGUF file, shape)."""
    return {name: (gguf_name, shape) for name, _, gguf_name, shape in _parameters(config)}


def _parameters(config: Config) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """The three names and the shape of every parameter."""
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
        before = f"layers.{i}.", f"model.layers.{i}.", f"blk.{i}."
        for *names, shape, field in LAYER:
            names = [prefix + name for prefix, name in zip(before, names, strict=True)]
            entries.append((*names, shape, field))
    return [
        (*names, tuple(prod(sizes[letter] for letter in word) for word in shape.split()))
        for *names, shape, field in entries
        if not field or getattr(config, field)
    ]


def canonical(name: str) -> str:
    """The table's form of a name in a file: bare models lack `model.`, heads have two names."""
    bare = name.removeprefix("model.")
    return HEAD if bare in HEADS else "model." + bare


def paired_heads(architecture: str, config: Config, name: str) -> int | None:
    """The number of heads whose rows a GGUF file has as rotary pairs; None for rows in order.

    name: ours. Queries and keys have different numbers of heads.
    """
    field = PAIRED.get(name.rsplit(".", 1)[-1])
    return getattr(config, field) if field and architecture in PAIRED_ROWS else None
