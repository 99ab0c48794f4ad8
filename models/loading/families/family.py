"""What a model family has of its own: a table, and the switches that its config.json sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.models.loading.field_values import integer
from jaxkv.models.network.config import Config

Fields = Mapping[str, Any]


class FusedPart(NamedTuple):
    """The rows of a stored matrix, or of its bias, that are one of our parameters.

    name: of the stored tensor in a layer. rows: the rows as axes, in the letters of
    weight_names.py; of this axis the part has the entries from `first` to before `last`. A word is
    a sum of products, as NH+2KH. stored: the shape of the tensor, and then `rows` are all its axes.
    transposed: the last two axes of the part are ours in the other order.
    """

    name: str
    rows: str
    axis: int
    first: str
    last: str
    stored: str = ""
    transposed: bool = False


@dataclass(frozen=True)
class GgufForm:
    """What GGUF files of a family have of their own, as llama.cpp's converter writes them.

    name: the architecture. fields: a field of config.json, under Llama's name, to the key of its
    value after the architecture. constants: what the files do not say, because llama.cpp has it as
    a constant, from the fields that they do say. names: our name of a parameter to theirs;
    names_of: those that follow from switches. fused: our name to the part of a tensor. paired_rows:
    as of a family. raised_norms: norm weights are stored as 1 + w. pattern: files say which layers
    have a window. windowed: layers have a window. long_rope: factors of LongRoPE may be tensors.
    """

    name: str
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    names: Mapping[str, str] = field(default_factory=dict)
    names_of: Callable[[Config], Mapping[str, str]] = lambda config: {}
    fused: Mapping[str, FusedPart] = field(default_factory=dict)
    paired_rows: bool = False
    raised_norms: bool = False
    pattern: bool = False
    windowed: bool = False
    long_rope: bool = False


@dataclass(frozen=True)
class Family:
    """A family of models.

    name: its model_type. architectures: its names in config.json. defaults: fields that a
    config.json may lack, from the configuration class at Hugging Face. applied: fields of its own
    that it reads. renamed: its name of a field that other families call otherwise. derived: fields
    that follow from others, from the fields under Llama's names. neutral: values of fields that
    ask for what the family is anyway; with another value a model is refused.
    switches: from the fields of config.json, with defaults, and its file to fields of `Config`; it
    raises UserError, or ValueError with a reason, for what it does not support.
    window_rope: layers with a window have rope settings of their own.
    layers: the beginning of a tensor's name, up to the number of its layer. names: our name of a
    parameter to its own name, where that is not Llama's; names_of: those that follow from switches.
    fused: our name to the part of a tensor. paired_rows: in each head, rows of queries and keys
    that rotate together are neighbours. packed: the kind of quantised weights that is read.
    overflows: hidden states exceed the range of float16. gguf: None where files of llama.cpp are
    not read.
    """

    name: str
    architectures: tuple[str, ...]
    switches: Callable[[Fields, Path], dict[str, Any]] = lambda fields, where: {}
    defaults: Fields = field(default_factory=dict)
    applied: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    window_rope: bool = False
    layers: str = "model.layers."
    names: Mapping[str, str] = field(default_factory=dict)
    names_of: Callable[[Config], Mapping[str, str]] = lambda config: {}
    fused: Mapping[str, FusedPart] = field(default_factory=dict)
    paired_rows: bool = False
    packed: str = ""
    overflows: bool = False
    gguf: GgufForm | None = None


GATE_UP = {  # of families that store both in one matrix
    "gate": FusedPart("mlp.gate_up_proj.weight", "2F", 0, "0", "F"),
    "up": FusedPart("mlp.gate_up_proj.weight", "2F", 0, "F", "2F"),
}
POST_NORMS = {  # of families whose norms follow attention and MLP
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
LAYER_NORM = {"rms_norm_eps": "attention.layer_norm_epsilon"}  # its key in GGUF files


def contiguous_qkv(name: str, kind: str = "weight") -> dict[str, FusedPart]:
    """Queries, keys and values, one after another. kind: weight or bias, the end of the name."""
    ends = {"q": ("0", "NH"), "k": ("NH", "NH+KH"), "v": ("NH+KH", "NH+2KH")}
    suffix = "" if kind == "weight" else "_bias"
    return {
        f"{part}{suffix}": FusedPart(f"{name}.{kind}", "NH+2KH", 0, *ends[part]) for part in ends
    }


def rotated_part(fields: Fields) -> float:
    """The part of a head that rotates, from `rotary_dim`, its number of dims in a GGUF file."""
    heads = max(1, fields["num_attention_heads"])
    head_dim = fields["head_dim"] or fields["hidden_size"] // heads
    return fields.get("rotary_dim", head_dim) / max(1, head_dim)


ROTATED = {"rotary_dim": "rope.dimension_count"}
FUSED_UP = {name: part._replace(name="ffn_up.weight") for name, part in GATE_UP.items()}


def or_rope(settings: Fields) -> Callable[[Fields], dict[str, Any]]:
    """For `Family.derived`: rope settings, where config.json names none."""

    def derived(fields: Fields) -> dict[str, Any]:
        named = fields.get("rope_parameters") or fields.get("rope_scaling")
        return {} if named else {"rope_parameters": settings}

    return derived


def activation(fields: Fields, name: str = "hidden_act") -> str:
    """The activation that a field names; raises ValueError for one that is not supported."""
    value = fields[name]
    if value not in ACTIVATIONS:
        raise ValueError(f"{name} must be one of {', '.join(ACTIVATIONS)}, got {value!r}")
    return ACTIVATIONS[value]


ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


def one_window(fields: Fields, where: Path) -> tuple[int | None, ...]:
    """The window of all layers, if there is any."""
    window = fields["sliding_window"]
    window = None if window is None else integer(fields, "sliding_window", where)
    return (window,) * fields["num_hidden_layers"]


def alternating(fields: Fields, every: int) -> list[str]:
    """The kind of each layer, where one of `every` has full attention."""
    count = fields["num_hidden_layers"]
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]


def windows_of(fields: Fields, where: Path, kinds: list[str]) -> tuple[int | None, ...]:
    """The window of each layer, from the kinds of layers or from `layer_types`."""
    kinds = fields.get("layer_types") or kinds
    count = fields["num_hidden_layers"]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ValueError(f"layer_types must be a list of {count} kinds, got {kinds!r:.60}")
    unknown = {*map(str, kinds)} - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"layer_types must be full or sliding attention, got {min(unknown)}")
    window = None
    if fields.get("sliding_window") is not None:
        window = integer(fields, "sliding_window", where)
    elif "sliding_attention" in kinds:
        raise ValueError("layer_types names sliding_attention, but there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
