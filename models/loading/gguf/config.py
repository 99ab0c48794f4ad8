"""The config of a GGUF file: its metadata in the terms of config.json, then read like one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxkv.errors import UserError, first_few, nearest
from jaxkv.models.loading.config import THETA, config_of
from jaxkv.models.loading.families import FAMILIES
from jaxkv.models.loading.families.family import GgufForm
from jaxkv.models.loading.gguf.header import Header, gguf_package
from jaxkv.models.loading.gguf.weights import read
from jaxkv.models.loading.known_fields import GGUF_APPLIED, GGUF_HARMLESS, GGUF_NEUTRAL, check
from jaxkv.models.loading.tensors import corrupt
from jaxkv.models.loading.weight_names import GGUF_EMBED, GGUF_HEAD, ROPE_FACTORS, SHORT_FACTORS
from jaxkv.models.network.config import Config
from jaxkv.rotary import Rotary, rotary

# Architectures of GGUF files, and the families whose files say so. Most files of Mistral models say
# llama.
ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "llama": ("llama", "mistral", "mixtral"), "mistral": ("mistral",), "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
}  # fmt: skip
for family in FAMILIES.values():
    if family.gguf is not None and family.name not in ARCHITECTURES.get(family.gguf.name, ()):
        ARCHITECTURES[family.gguf.name] = (*ARCHITECTURES.get(family.gguf.name, ()), family.name)
PATTERN = "attention.sliding_window_pattern"  # a bool per layer, or one of so many has no window
RMS_EPSILON = "attention.layer_norm_rms_epsilon"
# config.json's key -> key in the metadata, after "ARCHITECTURE."; its type; True: required.
KEYS = {
    "hidden_size": ("embedding_length", int, True),
    "intermediate_size": ("feed_forward_length", int, True),
    "num_hidden_layers": ("block_count", int, True),
    "num_attention_heads": ("attention.head_count", int, True),
    "num_key_value_heads": ("attention.head_count_kv", int, False),
    "head_dim": ("attention.key_length", int, False),
    "rms_norm_eps": (RMS_EPSILON, float, False),
    "max_position_embeddings": ("context_length", int, True),
    "sliding_window": ("attention.sliding_window", int, False),
    "rope_theta": ("rope.freq_base", float, False),
}
# The same for positions under "ARCHITECTURE.rope.scaling.".
SCALING = {
    "factor": ("factor", float, False),
    "original_max_position_embeddings": ("original_context_length", int, False),
    "beta_fast": ("yarn_beta_fast", float, False),
    "beta_slow": ("yarn_beta_slow", float, False),
    "attention_factor": ("attn_factor", float, False),
}
# Settings of the kind yarn alone.
YARN = ("yarn_beta_fast", "yarn_beta_slow")
SCALING_KINDS = ("none", "linear", "yarn")
# Biases: field of Config -> the tensor whose presence decides.
BIASES = {
    "qkv_bias": "blk.0.attn_q.bias",
    "out_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_gate.bias",
}
SECOND_NORM = "blk.0.attn_norm_2.weight"
TOKENS = "tokenizer.ggml.tokens"
NO_TOKEN = 2**32 - 1  # some converters write this id where a model has no such token
# Tokens that end a document, a turn or a message (before a tool's answer).
ENDS = ("eos", "eot", "eom")


def read_config(header: Header) -> Config:
    """The description of the model; raises UserError where it is not supported."""
    architecture, (family, fields) = _architecture(header), described(header)
    config = config_of(family, fields, {}, header.path)
    if family in FAMILIES:
        _check_fields(header, architecture, config)
        return _of_family(header, fields, config)
    config = dataclasses.replace(
        config, **{field: tensor in header.tensors for field, tensor in BIASES.items()}
    )
    _check_fields(header, architecture, config)
    return dataclasses.replace(config, encoding=_encoding(header, architecture, fields, config))


def described(header: Header) -> tuple[str, dict[str, Any]]:
    """The family of the model, and its metadata as the fields of config.json.

    Raises UserError where it is not supported.
    """
    architecture = _architecture(header)
    numbers = {key: _number(header, f"{architecture}.", *entry) for key, entry in KEYS.items()}
    family = _family(header, architecture, bool(numbers["sliding_window"]))
    fields = numbers | {
        "vocab_size": rows_of_embedding(header),
        "tie_word_embeddings": GGUF_HEAD not in header.tensors,
        "torch_dtype": _dtype(header),
        "rope_theta": numbers["rope_theta"] or THETA,
        "rope_scaling": _scaling(header, architecture),
        "bos_token_id": token_id(header, "bos"),
        "eos_token_id": list(ends(header)),
        "attention_bias": BIASES["qkv_bias"] in header.tensors,
        "mlp_bias": BIASES["mlp_bias"] in header.tensors,
        "second_norm": SECOND_NORM in header.tensors,  # of Falcon's attention
    }
    form = FAMILIES[family].gguf if family in FAMILIES else None
    if form is not None:
        fields |= _own_fields(header, form)
        fields["rope_scaling"] = _long_rope(header, form) or fields["rope_scaling"]
        fields |= form.constants(fields)
    if fields["rms_norm_eps"] is None:
        header.need(f"{architecture}.{RMS_EPSILON}", float)
    return family, fields


def _family(header: Header, architecture: str, windowed: bool) -> str:
    """The family of an architecture; some have several."""
    if architecture == "llama" and header.get(f"{architecture}.expert_count", int):
        return "mixtral"
    if architecture == "llama":
        return "mistral" if windowed else "llama"  # a Llama whose layers all have a window
    if architecture == "olmo2":
        return "olmo3" if windowed else "olmo2"
    (family,) = ARCHITECTURES[architecture]
    return family


def _own_fields(header: Header, form: GgufForm) -> dict[str, Any]:
    """The fields of config.json that a family has of its own, where the file has them."""
    keys = {**form.fields} | ({"layer_types": PATTERN} if form.pattern else {})
    values = {name: header.fields.get(f"{form.name}.{key}") for name, key in keys.items()}
    fields = {name: value for name, value in values.items() if value is not None}
    if "rotary_dim" in fields:
        key = f"{form.name}.{keys['rotary_dim']}"
        if header.checked(key, fields["rotary_dim"], int) < 1:
            raise corrupt(header.path, f"{key} must be at least 1, got {fields['rotary_dim']}")
    if isinstance(pattern := fields.get("layer_types"), list):
        kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
        fields["layer_types"] = kinds
    elif pattern is not None:
        del fields["layer_types"]
        fields["sliding_window_pattern"] = pattern
    return fields


def _of_family(header: Header, fields: dict[str, Any], config: Config) -> Config:
    """The description as the file stores it: with divisors of frequencies, and raised norms."""
    form = FAMILIES[config.family].gguf
    prefix = f"{form.name}.rope.scaling."
    amplitude = header.get(f"{prefix}attn_factor", float)
    applied = header.get(f"{prefix}type", str) == "yarn" or SHORT_FACTORS in header.tensors
    if amplitude not in (None, 1.0) and not applied:
        raise UserError(
            f"{header.path}: {prefix}attn_factor must be 1 without the type yarn, got {amplitude}; "
            "use another model"
        )
    if ROPE_FACTORS in header.tensors:
        encoding = _encoding(header, form.name, fields, config)
        layers = config.encodings
        if layers is not None:
            layers = tuple(encoding if e == config.encoding else e for e in layers)
        config = dataclasses.replace(config, encoding=encoding, encodings=layers)
    return dataclasses.replace(config, norm="rms") if form.raised_norms else config


def ends(header: Header) -> tuple[int, ...]:
    """The token ids that end a text."""
    ids = (token_id(header, name) for name in ENDS)
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def tokens_of(header: Header) -> list[str]:
    """The vocabulary; raises UserError where it has more tokens than the embedding has rows."""
    tokens, rows = header.need(TOKENS, list[str]), rows_of_embedding(header)
    if len(tokens) > rows:
        raise corrupt(
            header.path,
            f"{TOKENS} must have at most one token per row of {GGUF_EMBED}, {rows}, got "
            f"{len(tokens)}",
        )
    return tokens


def token_id(header: Header, name: str) -> int | None:
    """A special token, None where the file has none; raises UserError for an id without a token."""
    key, size = f"tokenizer.ggml.{name}_token_id", len(tokens_of(header))
    token = header.get(key, int)
    if token in (None, NO_TOKEN):
        return None
    if not 0 <= token < size:
        raise corrupt(header.path, f"{key} must be from 0 to {size - 1}, got {token}")
    return token


def rows_of_embedding(header: Header) -> int:
    """The size of the vocabulary with its padding."""
    if GGUF_EMBED not in header.tensors:
        raise UserError(f"{header.path}: missing tensor {GGUF_EMBED}; download it again")
    shape = header.tensors[GGUF_EMBED].shape
    if len(shape) != 2 or 0 in shape:
        raise corrupt(header.path, f"{GGUF_EMBED} must have rows and columns, got {list(shape)}")
    return shape[0]


def _architecture(header: Header) -> str:
    name, supported = header.get("general.architecture", str), ", ".join(ARCHITECTURES)
    if name is None:
        raise UserError(
            f"{header.path}: missing field general.architecture; it is no model that can be run: "
            f"supported architectures: {supported}"
        )
    if name not in ARCHITECTURES:
        near = nearest(name, ARCHITECTURES)
        remedy = f"did you mean {near}? " if near else ""
        raise UserError(
            f"{header.path}: unsupported architecture {name!r:.60}; {remedy}supported: {supported}"
        )
    if (kind := header.get("general.type", str, "model")) != "model":
        raise UserError(
            f"{header.path}: general.type must be model, got {kind!r:.60}; name the file of a model"
        )
    return name


def _number(header: Header, prefix: str, name: str, kind: type, required: bool) -> Any:
    """A field's value; a list of one value per layer counts as that value if all are equal.

    `config_of` checks its range.
    """
    key = prefix + name
    value = header.fields.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UserError(
                f"{header.path}: {key} must be the same for all layers, got {value!r:.60}; "
                "use another model"
            )
        value = value[0]
    if value is None:
        return header.need(key, kind) if required else None
    return header.checked(key, value, kind)


def _dtype(header: Header) -> str:
    """The widest dtype that keeps what the file stores; bfloat16 where it is quantised."""
    types = gguf_package().GGMLQuantizationType
    tensor_types = {tensor.type for tensor in header.tensors.values()}
    if tensor_types == {types.F32.value}:
        return "float32"
    return "float16" if tensor_types <= {types.F32.value, types.F16.value} else "bfloat16"


def _scaling(header: Header, architecture: str) -> dict[str, Any]:
    """rope_scaling of config.json; empty for plain positions.

    As in llama.cpp, a factor without a type is linear, and an older key of one counts. Raises
    UserError for settings that exclude each other.
    """
    prefix, old_key = f"{architecture}.rope.scaling.", f"{architecture}.rope.scale_linear"
    values = {key: _number(header, prefix, *entry) for key, entry in SCALING.items()}
    old, factor = header.get(old_key, float), values["factor"]
    if old and factor and old != factor:
        raise _excluded(header, {old_key: old, prefix + "factor": factor})
    factor = factor or old or None  # some files have an old factor of 0, which is none
    kind = header.get(prefix + "type", str, "linear" if factor else "none")
    if kind not in SCALING_KINDS:
        supported = ", ".join(SCALING_KINDS)
        raise UserError(
            f"{header.path}: unsupported {prefix}type {kind!r:.60}; supported: {supported}"
        )
    if kind != "yarn":
        yarn = {
            prefix + key: header.fields[prefix + key]
            for key in YARN
            if prefix + key in header.fields
        }
        if yarn:
            raise _excluded(header, {prefix + "type": kind} | yarn)
    if kind == "none":
        if factor not in (None, 1):
            raise _excluded(header, {prefix + "type": kind, "its factor": factor})
        return {}
    values["factor"] = factor or header.need(prefix + "factor", float)
    amplitude = values.pop("attention_factor")
    if amplitude is not None and kind == "yarn":
        # llama.cpp multiplies it with YaRN's own temperature; config.json gives the product.
        # Files of OLMo 3 have the product itself.
        temperature = _temperature(values["factor"])
        whole = architecture == "olmo2" and abs(amplitude - temperature) < 1e-3
        values["attention_factor"] = amplitude if whole else amplitude * temperature
    return {"rope_type": kind} | {key: value for key, value in values.items() if value is not None}


def _long_rope(header: Header, form: GgufForm) -> dict[str, Any]:
    """rope_scaling of config.json for LongRoPE, whose factors are tensors; empty without them."""
    tensor = header.tensors.get(SHORT_FACTORS)
    if tensor is None or not form.long_rope:
        return {}
    prefix = f"{form.name}.rope.scaling."
    settings = {
        "rope_type": "longrope",
        "short_factor": read(tensor, np.dtype("f4")).astype(np.float64).tolist(),
        "original_max_position_embeddings": header.need(f"{prefix}original_context_length", int),
    }
    amplitude = header.get(f"{prefix}attn_factor", float)
    return settings if amplitude is None else settings | {"attention_factor": amplitude}


def _temperature(factor: float) -> float:
    """YaRN's attention temperature."""
    return 1 + 0.1 * float(np.log(max(factor, 1.0)))


def _excluded(header: Header, settings: dict[str, Any]) -> UserError:
    """The error for settings of rope of which one is wrong."""
    shown = first_few(f"{key} {value!r:.40}" for key, value in settings.items())
    return UserError(
        f"{header.path}: settings of rope that exclude each other: {shown}; use a file that was "
        "converted again"
    )


def _check_fields(header: Header, architecture: str, config: Config) -> None:
    """Raise UserError for a field that would change the model; warn of unknown ones."""
    prefix, head_dim = f"{architecture}.", config.head_dim
    fields = {
        key.removeprefix(prefix): value
        for key, value in header.fields.items()
        if key.startswith(prefix)
    }
    scaled = header.get(f"{prefix}rope.scaling.type", str, "") == "yarn"
    # Negative means unset. llama.cpp reads the amplitude as a factor, its converter writes the
    # product with YaRN's temperature: both agree on the temperature alone.
    factor = fields.get("rope.scaling.factor") or fields.get("rope.scale_linear") or 1.0
    neutral = GGUF_NEUTRAL | {
        "attention.scale": (0, head_dim**-0.5),
        "attention.value_length": (head_dim,),
        "rope.dimension_count": (head_dim,),
        "attention.key_length_swa": (head_dim,),
        "attention.value_length_swa": (head_dim,),
        "rope.freq_base_swa": (fields.get("rope.freq_base", THETA),),
        "rope.dimension_count_swa": (head_dim,),
        "rope.scaling.yarn_ext_factor": (-1, float(scaled)),
        "rope.scaling.yarn_attn_factor": (_temperature(factor),) if scaled else (1,),
    }
    form = FAMILIES[config.family].gguf if config.family in FAMILIES else GgufForm("")
    applied = {*form.fields.values()} | ({PATTERN} if form.pattern else set())
    neutral = {key: values for key, values in neutral.items() if key not in applied}
    # llama.cpp applies no window where a family has none, and none to these two.
    if config.family in ("qwen2", "qwen3") or (form.name and not form.windowed):
        windows = {"attention.sliding_window": (0, config.context)}
        neutral |= windows if (fields.get("attention.sliding_window") or 0) < config.context else {}
    check(
        {prefix + key: value for key, value in fields.items()},
        {prefix + key: values for key, values in neutral.items()},
        {prefix + key for key in GGUF_APPLIED | GGUF_HARMLESS | applied},
        header.path,
    )


def _encoding(header: Header, architecture: str, fields: dict[str, Any], config: Config) -> Rotary:
    """The rotary encoding; a tensor of divisors multiplies with scaling, as in llama.cpp.

    fields: fields of config.json. The tensor comes with Llama 3.1 and later.
    """
    scaling = dict(fields["rope_scaling"])
    scaling["kind"] = scaling.pop("rope_type", "default")
    amplitude = header.get(f"{architecture}.rope.scaling.attn_factor", float)
    if amplitude is not None:
        scaling.setdefault("attention_factor", amplitude)
    if (tensor := header.tensors.get(ROPE_FACTORS)) is not None:
        if tensor.shape != (config.head_dim // 2,):
            raise UserError(
                f"wrongly shaped tensor in {header.path}: {ROPE_FACTORS} is {list(tensor.shape)}, "
                f"its metadata says {[config.head_dim // 2]}; download it again"
            )
        factors = read(tensor, np.dtype("f4")).astype(np.float64)
        if not np.all(np.isfinite(factors) & (factors > 0)):
            raise corrupt(header.path, f"{ROPE_FACTORS} must be above 0 and finite")
        scaling["factors"] = tuple(factors.tolist())
    return rotary(config.head_dim, fields["rope_theta"], scaling, fields["max_position_embeddings"])
