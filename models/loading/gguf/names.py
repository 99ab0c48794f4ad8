"""The weight map of GGUF files: our parameter names and theirs, as one table.

Shapes are those of models/loading/hf/names.py; a GGUF file stores them in reverse order.
"""

from __future__ import annotations

from jaxkv.models.loading.hf.names import shapes as hf_shapes
from jaxkv.models.network.config import Config

EMBED, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
OUTER = {"embed": EMBED, "norm": "output_norm.weight", "head": HEAD}
LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}
# Tensors that are no weights: they are read with the config.
OTHER = {ROPE_FACTORS}
# Architectures whose query and key rows are stored with each head's rotary pairs side by side,
# (0, H/2, 1, H/2 + 1, ...), and the field of Config that counts the heads of such a parameter.
PAIRED_ROWS = {"llama", "mistral"}
HEADS = {"q": "heads", "q_bias": "heads", "k": "kv_heads", "k_bias": "kv_heads"}


def shapes(config: Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Our name of every parameter -> (its name in a GGUF file, shape)."""
    return {name: (_gguf_name(name), shape) for name, (_, shape) in hf_shapes(config).items()}


def paired_heads(architecture: str, config: Config, name: str) -> int | None:
    """The number of heads whose rows are stored as rotary pairs; None for rows in order.

    name: ours. Queries and keys have different numbers of heads.
    """
    field = HEADS.get(name.rsplit(".", 1)[-1])
    return getattr(config, field) if field and architecture in PAIRED_ROWS else None


def _gguf_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{LAYER[part]}"
