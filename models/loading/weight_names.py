"""The weight map: our parameter names, those in safetensors and GGUF files, and shapes, as a table.

Weights keep Hugging Face's (out, in) orientation; a GGUF file stores a shape in reverse order. In a
shape a word is the product of its letters: D width, F mlp, V vocabulary, N query heads, K kv heads,
G query heads per kv head, H head dim, E experts, M mlp of an expert. In a name of Hugging Face's, *
is the number of an expert, whose tensors are one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from jaxkv.models.loading.families import FAMILIES, LLAMA_FORM
from jaxkv.models.loading.families.family import Family, GgufForm
from jaxkv.models.network.config import Config, of_layer

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GGUF_EMBED, GGUF_HEAD = "token_embd.weight", "output.weight"
# our name, Hugging Face's, that in GGUF files, shape, the fields of Config that say if it exists
OUTER = (
    ("embed", EMBED, GGUF_EMBED, "V D", ""),
    ("norm", "model.norm.weight", "output_norm.weight", "D", ""),
    ("norm_bias", "model.norm.bias", "output_norm.bias", "D", "norm_bias"),
    ("head", HEAD, GGUF_HEAD, "V D", "untied_head"),
)
LAYER = (
    ("attn_norm", "input_layernorm.weight", "attn_norm.weight", "D", "norms_before"),
    ("attn_norm_bias", "input_layernorm.bias", "attn_norm.bias", "D", "norms_before norm_bias"),
    ("attn_post_norm", "", "post_attention_norm.weight", "D", "norms_after"),
    ("q", "self_attn.q_proj.weight", "attn_q.weight", "NH D", ""),
    ("k", "self_attn.k_proj.weight", "attn_k.weight", "KH D", ""),
    ("v", "self_attn.v_proj.weight", "attn_v.weight", "KH D", ""),
    ("o", "self_attn.o_proj.weight", "attn_output.weight", "D NH", ""),
    ("q_bias", "self_attn.q_proj.bias", "attn_q.bias", "NH", "qkv_bias"),
    ("k_bias", "self_attn.k_proj.bias", "attn_k.bias", "KH", "qkv_bias"),
    ("v_bias", "self_attn.v_proj.bias", "attn_v.bias", "KH", "qkv_bias"),
    ("o_bias", "self_attn.o_proj.bias", "attn_output.bias", "D", "out_bias"),
    ("q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", "H", "head_norms"),
    ("k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", "H", "head_norms"),
    ("q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", "NH", "whole_norms"),
    ("k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", "KH", "whole_norms"),
    ("sink_logits", "self_attn.sinks", "", "N", "learned_sinks"),
    ("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight", "D", "mlp_norms"),
    ("mlp_norm_bias", "post_attention_layernorm.bias", "ffn_norm.bias", "D", "mlp_norms norm_bias"),
    ("mlp_post_norm", "", "post_ffw_norm.weight", "D", "norms_after"),
    ("gate", "mlp.gate_proj.weight", "ffn_gate.weight", "F D", "dense gated"),
    ("up", "mlp.up_proj.weight", "ffn_up.weight", "F D", "dense"),
    ("down", "mlp.down_proj.weight", "ffn_down.weight", "D F", "dense"),
    ("gate_bias", "mlp.gate_proj.bias", "ffn_gate.bias", "F", "dense gated mlp_bias"),
    ("up_bias", "mlp.up_proj.bias", "ffn_up.bias", "F", "dense mlp_bias"),
    ("down_bias", "mlp.down_proj.bias", "ffn_down.bias", "D", "dense mlp_bias"),
    ("router", "mlp.gate.weight", "ffn_gate_inp.weight", "E D", "experts"),
    ("router_bias", "mlp.gate.bias", "ffn_gate_inp.bias", "E", "experts mlp_bias"),
    ("expert_gate", "mlp.experts.*.gate_proj.weight", "ffn_gate_exps.weight", "E M D", "experts"),
    ("expert_up", "mlp.experts.*.up_proj.weight", "ffn_up_exps.weight", "E M D", "experts"),
    ("expert_down", "mlp.experts.*.down_proj.weight", "ffn_down_exps.weight", "E D M", "experts"),
    ("expert_gate_bias", "", "ffn_gate_exps.bias", "E M", "experts mlp_bias"),
    ("expert_up_bias", "", "ffn_up_exps.bias", "E M", "experts mlp_bias"),
    ("expert_down_bias", "", "ffn_down_exps.bias", "E D", "experts mlp_bias"),
)
HEADS = {"lm_head.weight", "output.weight"}
# Buffers that old versions of transformers saved; they are computed from config.json.
HARMLESS = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
# Of models that read pictures too: a part of the names in the decoder, and other tensors.
LANGUAGE = "language_model."
TOWERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
          "model.multi_modal_projector.")  # fmt: skip
# Divisors of rotary frequencies in GGUF files. No token within the context needs the long ones.
ROPE_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_short.weight"
LONG_FACTORS = "rope_factors_long.weight"
# Architectures whose query and key rows are stored in GGUF files with each head's rotary pairs side
# by side, (0, H/2, 1, H/2 + 1, ...), and the field of Config that counts the heads of a parameter.
PAIRED_ROWS = {"llama", "mistral"}
PAIRED = {"q": "heads", "q_bias": "heads", "k": "kv_heads", "k_bias": "kv_heads"}

NamedShapes = dict[str, tuple[str, tuple[int, ...]]]


class TensorPart(NamedTuple):
    """The part of a stored tensor that is one of our parameters.

    shape: of the stored tensor. axes: the same with an axis as several. Of the axis `axis` the part
    has the entries from `first` to before `last`. pairs: (heads, rotated dims), where the rows of a
    head that rotate together are neighbours in the file. transposed: the last two axes are stored
    in the other order.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    axis: int
    first: int
    last: int
    pairs: tuple[int, int] | None = None
    transposed: bool = False

    def cut(self, stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The parameter of this shape, from the stored tensor; a view where it can be."""
        part = np.moveaxis(stored.reshape(self.axes), self.axis, 0)[self.first : self.last]
        part = np.moveaxis(part, 0, self.axis)
        if self.transposed:
            return part.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
        part = part.reshape(shape)
        if self.pairs is None:
            return part
        return part[np.argsort(rows_of_pairs(shape[0], *self.pairs))]


def shapes(config: Config) -> NamedShapes:
    """Our name of every parameter -> (Hugging Face's name, shape)."""
    return {name: (hf_name, shape) for name, hf_name, _, shape in _parameters(config)}


def gguf_shapes(config: Config) -> NamedShapes:
    """Our name of every parameter -> (its name in a GGUF file, shape)."""
    return {name: (gguf_name, shape) for name, _, gguf_name, shape in _parameters(config)}


def stored_shapes(config: Config, gguf: bool = False) -> NamedShapes:
    """Our name of every parameter -> (its name in files, shape of the stored tensor).

    A parameter of several tensors has an entry for each, by its name, a space and a number. gguf:
    in GGUF files, instead of Hugging Face's.
    """
    parts, stored = tensor_parts(config, gguf), {}
    for name, (file_name, shape) in (gguf_shapes if gguf else shapes)(config).items():
        if "*" in file_name:
            for number in range(shape[0]):
                stored[f"{name} {number}"] = file_name.replace("*", str(number)), shape[1:]
        else:
            stored[name] = file_name, parts[name].shape if name in parts else shape
    return stored


def tensor_parts(config: Config, gguf: bool = False) -> dict[str, TensorPart]:
    """Our name of every parameter that is a part of a stored tensor, and which part.

    Rows of GGUF files in pairs are not parts; `paired_heads` counts them.
    """
    sizes, family = _sizes(config), _family(config)
    fused = _gguf(config).fused if gguf else family.fused
    size = lambda text: _size(text, sizes)
    parts = {}
    for name, (_, shape) in shapes(config).items():
        kind = name.rpartition(".")[2]
        if (part := fused.get(kind)) is not None:
            axes = tuple(map(size, part.rows.split()))
            if part.stored:
                stored = tuple(map(size, part.stored.split()))
            else:
                stored, axes = (prod(axes), *shape[1:]), (*axes, *shape[1:])
            ends = size(part.first), size(part.last)
            parts[name] = TensorPart(stored, axes, part.axis, *ends, None, part.transposed)
        elif not gguf and family.paired_rows and kind in PAIRED:
            pairs = getattr(config, PAIRED[kind]), 2 * len(config.encoding.frequencies)
            parts[name] = TensorPart(shape, shape, 0, 0, shape[0], pairs)
    return parts


def _family(config: Config) -> Family:
    return FAMILIES.get(config.family, LLAMA_FORM)


def _gguf(config: Config) -> GgufForm:
    return _family(config).gguf or GgufForm("")


def rope_tensors(config: Config) -> tuple[str, ...]:
    """Tensors of GGUF files that are read with the config, if at all."""
    return ROPE_FACTORS, *((SHORT_FACTORS, LONG_FACTORS) if _gguf(config).long_rope else ())


def _names(config: Config) -> dict[str, str]:
    """Our name of a parameter to Hugging Face's, where that is not Llama's."""
    family = _family(config)
    return {**family.names, **family.names_of(config)}


def _sizes(config: Config) -> dict[str, int]:
    """The letters of shapes."""
    return {
        "D": config.width,
        "F": config.mlp,
        "E": config.experts,
        "M": config.expert_mlp,
        "V": config.vocab,
        "N": config.heads,
        "K": config.kv_heads,
        "G": config.heads // config.kv_heads,
        "H": config.head_dim,
    }


def _size(word: str, sizes: Mapping[str, int]) -> int:
    """A sum of products of letters and digits."""
    return sum(prod(sizes.get(x) or int(x) for x in term) if term != "0" else 0
               for term in word.split("+"))  # fmt: skip


def _parameters(config: Config) -> list[tuple[str, str, str, tuple[int, ...]]]:
    """The three names and the shape of every parameter."""
    family, sizes = _family(config), _sizes(config)
    names_of_family = {name: part.name for name, part in family.fused.items()} | _names(config)
    form = _gguf(config)
    in_gguf = {name: part.name for name, part in form.fused.items()}
    in_gguf |= {**form.names, **form.names_of(config)}
    entries = [
        (config, name, names_of_family.get(name, hf), gguf, *rest)
        for name, hf, gguf, *rest in OUTER
    ]
    for i in range(config.layers):
        described = of_layer(config, i)
        before = f"layers.{i}.", f"{family.layers}{i}.", f"blk.{i}."
        for name, hf_name, gguf_name, shape, fields in LAYER:
            names = name, names_of_family.get(name, hf_name), in_gguf.get(name, gguf_name)
            names = [prefix + name for prefix, name in zip(before, names, strict=True)]
            entries.append((described, *names, shape, fields))
    return [
        (*names, tuple(_size(word, sizes) for word in shape.split()))
        for described, *names, shape, fields in entries
        if all(getattr(described, field) for field in fields.split())
    ]


def outer_name(config: Config, name: str) -> str:
    """Hugging Face's name of a parameter outside the layers; name: ours."""
    return ({ours: hf_name for ours, hf_name, *_ in OUTER} | _names(config))[name]


def canonical(config: Config, name: str) -> str:
    """The table's form of a name in a file: bare models lack `model.`, heads have two names."""
    prefix, head = _family(config).layers.partition(".")[0] + ".", outer_name(config, "head")
    bare = name.removeprefix(LANGUAGE).removeprefix(prefix).removeprefix(LANGUAGE)
    return head if bare in {*HEADS, head} else prefix + bare


def paired_heads(architecture: str, config: Config, name: str) -> int | None:
    """The number of heads whose rows a GGUF file has as rotary pairs; None for rows in order.

    name: ours. Queries and keys have different numbers of heads.
    """
    field = PAIRED.get(name.rsplit(".", 1)[-1])
    paired = architecture in PAIRED_ROWS or _gguf(config).paired_rows
    return getattr(config, field) if field and paired else None


def rows_of_pairs(rows: int, heads: int, rotated: int | None = None) -> np.ndarray:
    """Our row of each stored row, where rows that rotate together are neighbours in the file.

    rotated: so many rows of each head, by default all.
    """
    order = np.arange(rows).reshape(heads, -1)
    first = order[:, :rotated]
    halves = first.reshape(heads, 2, -1).swapaxes(1, 2).reshape(first.shape)
    return np.concatenate([halves, order[:, first.shape[1] :]], axis=1).reshape(-1)
