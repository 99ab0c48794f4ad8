"""Read config.json into a `Config`: the form of Llama here, others by a table (families/).

Both dialects are supported: `rope_theta`/`rope_scaling`/`torch_dtype`, and the later
`rope_parameters`/`dtype`. A missing key has the default of the architecture's configuration class
at Hugging Face (DEFAULTS).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

from jaxkv.contract import DTYPES
from jaxkv.errors import UserError, first_few, nearest
from jaxkv.models.loading.families import FAMILIES, LLAMA_FORM
from jaxkv.models.loading.families.family import Family, activation
from jaxkv.models.loading.field_values import boolean, integer, positive
from jaxkv.models.loading.hf.folder import read_json
from jaxkv.models.loading.known_fields import check_config
from jaxkv.models.network.config import SINK_LOGITS, Config
from jaxkv.rotary import NoPosition, Rotary, rotary

LLAMA_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Llama with a sink logit in every head's softmax: its own architecture name keeps other
# libraries from loading such a model without the logits.
SINK_LLAMA = "SinkLlamaForCausalLM"
ARCHITECTURES = {
    name + suffix: name.lower()
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
    for suffix in ("ForCausalLM", "Model")
} | {SINK_LLAMA: "llama"}
ARCHITECTURES |= {
    name: family.name for family in FAMILIES.values() for name in family.architectures
}
# Models that read pictures too, and the model_type of their text part, which a text prompt uses.
WITH_TOWER = {
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Mistral3ForConditionalGeneration": ("ministral3", "mistral"),
}
PICTURE_IDS = {"Gemma3ForConditionalGeneration": 262144, "Mistral3ForConditionalGeneration": 10}
SUFFIX = re.compile("(ForCausalLM|ForConditionalGeneration|LMHeadModel)$")  # of an architecture
SUPPORTED = [name for name in (*ARCHITECTURES, *WITH_TOWER) if not name.endswith("Model")]

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,
    "num_key_value_heads": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
    "sink_logit": "none",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
# (projections q k v, output projection, mlp): True, False, or the key of config.json.
BIASES: dict[str, tuple[bool | str, bool | str, bool | str]] = {
    "llama": ("attention_bias", "attention_bias", "mlp_bias"),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": ("attention_bias", "attention_bias", False),
}
QK_NORM = {"qwen3"}

CONTEXT, KV_HEADS = "max_position_embeddings", "num_key_value_heads"

# For each rope kind: its required fields, and its optional ones.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor"),
        ("original_max_position_embeddings",),
    ),
    "yarn": (
        (),
        (
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (("short_factor",), ("factor", "attention_factor")),
}
OLD_KINDS = {"su": "longrope"}  # names of the first published files
THETA = 10000.0
STRETCHED = ("linear", "yarn")  # the context is the original length times the factor


def read_config(folder: Path) -> Config:
    """The description of the model in `folder`, from config.json and generation_config.json."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}; name the folder of a model")
    where = folder / "config.json"
    if not where.is_file():
        names = first_few(sorted(file.name for file in folder.glob("*.gguf")))
        remedy = f"name a GGUF file: {names}" if names else "name the folder of a published model"
        if (folder / "hf").is_dir():
            remedy = f"a run of `jaxkv pretrain` has its model in {folder / 'hf'}; name that"
        raise UserError(f"no config.json in {folder}; {remedy}")
    if (adapter := folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} has an adapter, {adapter.name}, which is not applied; merge it into the "
            "weights, or move its files away"
        )
    fields = text_fields(read_json(where), where)
    generation = read_json(folder / "generation_config.json")
    config = config_of(_family(fields, where), fields, generation, where)
    prepared = _prepared(config.family, fields, where)
    check_config(prepared, rope_fields(prepared, where), config, where)
    return config


def text_fields(fields: dict[str, Any], where: Path) -> dict[str, Any]:
    """The fields of the decoder: all of them, or those of the text part of a model with a tower."""
    name = _named(fields)
    if name not in WITH_TOWER:
        return fields
    text = fields.get("text_config")
    kinds = WITH_TOWER[name]
    if not isinstance(text, dict) or (kind := text.get("model_type", kinds[0])) not in kinds:
        kind = text.get("model_type") if isinstance(text, dict) else text
        raise UserError(
            f"{where}: text_config of {name} must be of model_type {' or '.join(kinds)}, got "
            f"{kind!r:.60}; use another model"
        )
    shared = "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config"
    outer = {key: fields[key] for key in shared if key in fields}
    tied = {key: fields[key] for key in ("tie_word_embeddings",) if key in fields}
    picture = fields.get("image_token_index", fields.get("image_token_id", PICTURE_IDS[name]))
    named = {"architectures": [], "model_type": kind, "picture_token_id": picture}
    return outer | text | tied | named


def config_of(
    family: str, fields: Mapping[str, Any], generation: Mapping[str, Any], where: Path
) -> Config:
    """The description that the fields of a config.json give.

    family: one of LLAMA_FAMILIES or FAMILIES. generation: fields of generation_config.json. where:
    the file, for error messages. Raises UserError for a field that is missing, invalid or
    unsupported.
    """
    table = FAMILIES.get(family)
    defaults = dict(DEFAULTS[family] if table is None else table.defaults)
    prepared = _prepared(family, fields, where)
    if "rope_theta" in rope_fields(prepared, where):  # in either dialect
        defaults.pop("rope_theta", None)
    raw = COMMON | defaults | prepared
    if table is None and raw["hidden_act"] not in ("silu", "swish"):
        raise UserError(
            f"{where}: hidden_act must be silu, got {raw['hidden_act']!r}; use another model"
        )
    layers, context = integer(raw, "num_hidden_layers", where), integer(raw, CONTEXT, where)
    heads, kv_heads, head_dim = _heads(raw, where)
    biases = BIASES.get(family, BIASES["llama"])
    if table is not None:
        biases = [name in table.applied and name for name in biases]
    qkv, out, mlp = (boolean(raw, b, where) if isinstance(b, str) else b for b in biases)
    encoding, context = encoding_of(raw, head_dim, context, where)
    config = Config(
        family=family,
        vocab=integer(raw, "vocab_size", where),
        width=integer(raw, "hidden_size", where),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=integer(raw, "intermediate_size", where),
        norm_eps=positive(raw, "rms_norm_eps", where),
        tied=boolean(raw, "tie_word_embeddings", where),
        qkv_bias=qkv,
        out_bias=out,
        mlp_bias=mlp,
        qk_norm="head" if family in QK_NORM else "none",
        windows=_windows(family, raw, layers, where) if table is None else (None,) * layers,
        encoding=encoding,
        context=context,
        dtype=_dtype(raw, where),
        bos=next(iter(_ids("bos_token_id", generation, raw, where)), None),
        eos=_ids("eos_token_id", generation, raw, where),
        sink_logit=_sink_logit(raw, where),
        picture_ids=_ids("picture_token_id", {}, raw, where) if "picture_token_id" in raw else (),
    )
    config = config if table is None else _switched(config, table, raw, where)
    # A window of the whole context or more hides nothing, and would be allocated.
    windows = (None if w is None or w >= context else w for w in config.windows)
    return replace(config, windows=tuple(windows))


def _heads(raw: Mapping[str, Any], where: Path) -> tuple[int, int, int]:
    """The numbers of query and KV heads, and the head dim."""
    width, heads = integer(raw, "hidden_size", where), integer(raw, "num_attention_heads", where)
    kv_heads = heads if raw[KV_HEADS] is None else integer(raw, KV_HEADS, where)
    if heads % kv_heads:
        raise UserError(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads, "
            f"got {heads} and {kv_heads}; download the file again"
        )
    if raw["head_dim"] is not None:
        return heads, kv_heads, integer(raw, "head_dim", where)
    if width % heads:
        raise UserError(
            f"{where}: without head_dim, hidden_size must be a multiple of num_attention_heads, "
            f"got {width} and {heads}; download the file again"
        )
    return heads, kv_heads, width // heads


def _prepared(family: str, fields: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The fields of config.json under the names of Llama; raises where two of them contradict.

    Rope settings of layers with a window are in `window_rope`, if they are their own.
    """
    table = FAMILIES.get(family, LLAMA_FORM)
    raw = {name: value for name, value in fields.items() if name not in table.renamed}
    for name, value in fields.items():
        shared = table.renamed.get(name, name)
        if raw.setdefault(shared, value) != value:
            raise UserError(
                f"{where}: {name} and {shared} are one setting, got {value!r:.60} and "
                f"{raw[shared]!r:.60}; delete the wrong one"
            )
    raw |= table.derived(raw)
    rope = raw.get("rope_parameters")
    kinds = {"full_attention", "sliding_attention"}
    if table.window_rope and isinstance(rope, dict) and kinds <= {*rope}:
        raw |= {"rope_parameters": rope["full_attention"]}
        raw |= {"window_rope": rope["sliding_attention"]}
    return raw


def _switched(config: Config, family: Family, raw: Mapping[str, Any], where: Path) -> Config:
    """The description with the switches of a family."""
    try:
        changes = family.switches(raw, where)
        if "activation" not in changes:
            changes["activation"] = activation(raw)
    except UserError:  # names the file already
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}; use another model") from None
    rotated, local = changes.pop("rotated_layers", None), changes.pop("window_rope", None)
    config = replace(config, **changes)
    if rotated is not None:
        layers = tuple(config.encoding if rotates else NoPosition() for rotates in rotated)
        config = replace(config, encodings=layers)
    if local is not None:
        settings = {name: raw[name] for name in raw if not name.startswith("rope_")}
        settings["rope_parameters"] = local
        of_window, _ = encoding_of(settings, config.head_dim, config.context, where)
        layers = tuple(
            config.encoding if window is None else of_window for window in config.windows
        )
        config = replace(config, encodings=layers)
    return config


def rope_fields(raw: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The rope settings of config.json, from either dialect, under the names of the later one.

    Raises UserError where they are no object, differ between layers, or exclude each other.
    """
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters", ""):
        rope = raw.get(name) or {} if name else {"rope_theta": raw.get("rope_theta")}
        if not isinstance(rope, dict):
            raise UserError(f"{where}: {name} must be an object, got {rope!r:.60}; delete it")
        nested = [value for value in rope.values() if isinstance(value, dict)]
        if nested and any(value != nested[0] for value in nested):
            raise UserError(f"{where}: {name} that differ between layers are not supported")
        for key, value in (nested[0] if nested else rope).items():
            key = "rope_type" if key == "type" else key
            if value is not None and settings.setdefault(key, value) != value:
                raise UserError(
                    f"{where}: {key} has two values, {settings[key]!r:.60} and {value!r:.60}; "
                    "delete the wrong one"
                )
    return settings


def encoding_of(
    raw: Mapping[str, Any], head_dim: int, context: int, where: Path
) -> tuple[Rotary, int]:
    """The rotary encoding, and the context for which it is scaled.

    raw: the fields of config.json. context: max_position_embeddings. By the documentation of
    transformers, `factor` counts from the original length, which many published models leave there.
    Llama 3 states its final length. Raises UserError for missing, invalid or unsupported settings.
    """
    rope = rope_fields(raw, where)
    kind = rope.get("rope_type", "default")
    kind = OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(
            f"{where}: unsupported rope kind {kind!r}; supported: {', '.join(KINDS)}; use another "
            "model"
        )
    parts = (settings.get("partial_rotary_factor") for settings in (rope, raw))
    part = next((part for part in parts if part is not None), 1)
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise UserError(
            f"{where}: partial_rotary_factor must be above 0 and at most 1, got {part!r}; "
            "download the file again"
        )
    rotated = int(head_dim * part)
    # The order in which transformers looks for the original length.
    original = raw.get("original_max_position_embeddings")
    original = original or rope.get("original_max_position_embeddings") or context
    rope = {"rope_theta": THETA} | rope
    rope["original_max_position_embeddings"] = original
    required, optional = KINDS[kind]
    missing = [field for field in required if rope.get(field) is None]
    if missing:
        raise UserError(f"{where}: rope kind {kind} lacks the field {', '.join(missing)}; add it")
    scaling = {field: rope[field] for field in required + optional if rope.get(field) is not None}
    texts = {name: value for name, value in scaling.items() if isinstance(value, str)}
    if texts:
        raise UserError(
            f"{where}: settings of rope must be numbers, got {texts!r:.60}; download the file again"
        )
    theta = rope["rope_theta"]
    positive(rope, "rope_theta", where)
    if kind == "longrope":
        original = integer(rope, "original_max_position_embeddings", where, minimum=2)
        scaling, context = _longrope(scaling, rotated, original, context, where), original
    elif "short_factor" in rope:
        raise UserError(
            f"{where}: short_factor is of the rope kind longrope, got it with {kind}; delete it, "
            "or change the kind"
        )
    try:
        encoding = rotary(head_dim, theta, {"kind": kind} | scaling, context, rotated)
        stretched = int(original * scaling.get("factor", 1)) if kind in STRETCHED else 0
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: {error}") from None
    return encoding, max(context, stretched)


def _longrope(
    scaling: Mapping[str, Any], rotated: int, original: int, context: int, where: Path
) -> dict[str, Any]:
    """LongRoPE within the original length: short factors, and the amplitude of the whole.

    Beyond that length the model has other factors, with which no cached key is rotated.
    """
    factors = scaling["short_factor"]
    numbers = isinstance(factors, list) and all(isinstance(f, int | float) for f in factors)
    if not numbers or len(factors) != rotated // 2 or min(factors) <= 0:
        raise UserError(
            f"{where}: short_factor must be {rotated // 2} numbers above 0, got {factors!r:.60}; "
            "download the file again"
        )
    stretch = positive(scaling, "factor", where) if "factor" in scaling else context / original
    amplitude = None
    if "attention_factor" in scaling:
        amplitude = positive(scaling, "attention_factor", where)
    if amplitude is None:
        amplitude = 1.0 if stretch <= 1 else (1 + log(stretch) / log(original)) ** 0.5
    return {"kind": "default", "factors": tuple(factors), "attention_factor": amplitude}


def _family(fields: Mapping[str, Any], where: Path) -> str:
    """The family named by `architectures`, else by `model_type`; raises for every other model."""
    kind = str(fields.get("model_type", ""))
    names = fields.get("architectures") or []
    named = _named(fields) or kind
    method = _get(fields.get("quantization_config"), "quant_method", "unknown method")
    packed = FAMILIES.get(ARCHITECTURES.get(named, kind), LLAMA_FORM).packed
    if fields.get("quantization_config") and (not packed or method != packed):
        raise UserError(
            f"{where}: quantized weights ({method}) are not supported; "
            "use the float32, bfloat16 or float16 version of the model"
        )
    known = (*LLAMA_FAMILIES, *FAMILIES)
    if named in ARCHITECTURES or (not names and kind in known):
        family = ARCHITECTURES.get(named, kind)
        if kind in known and kind != family:
            raise UserError(
                f"{where}: architectures names {named}, and model_type {kind}; correct one of them"
            )
        return family
    if not named:
        raise UserError(f"{where}: missing field architectures; give one that `jaxkv models` lists")
    stems = {SUFFIX.sub("", name).lower(): name for name in reversed(SUPPORTED)}
    near = nearest(SUFFIX.sub("", named), stems)
    remedy = f"the nearest is {stems[near]}; " if near else ""
    raise UserError(
        f"{where}: unsupported architecture {named}; {remedy}`jaxkv models` lists what is supported"
    )


def _named(fields: Mapping[str, Any]) -> str:
    """The first of `architectures`; empty where there is none."""
    names = fields.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    return str(names[0]) if names else ""


def _windows(
    family: str, raw: Mapping[str, Any], layers: int, where: Path
) -> tuple[int | None, ...]:
    """Each layer's own sliding window, with the meaning it has in transformers.

    Mistral: one for all layers. Qwen: off unless `use_sliding_window`; the layers are those that
    `layer_types` names, else those from `max_window_layers` on.
    """
    if family == "llama":
        return (None,) * layers
    on = family == "mistral" or boolean(raw, "use_sliding_window", where)
    window = integer(raw, "sliding_window", where) if on and raw["sliding_window"] else None
    if family == "mistral":
        return (window,) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = layers if window is None else integer(raw, "max_window_layers", where, minimum=0)
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UserError(f"{where}: layer_types must name each of the {layers} layers, got {kinds}")
    unknown = set(map(str, kinds)) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(
            f"{where}: unsupported layer_types {', '.join(sorted(unknown))}; "
            "supported: full_attention, sliding_attention"
        )
    if window is None and "sliding_attention" in kinds:
        raise UserError(
            f"{where}: layer_types names sliding_attention, but there is no window; "
            "set use_sliding_window and sliding_window"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(raw: Mapping[str, Any], where: Path) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"{where}: dtype must be one of {', '.join(DTYPES)}, got {name}")
    return name


def _sink_logit(raw: Mapping[str, Any], where: Path) -> str:
    value = raw["sink_logit"]
    if value not in SINK_LOGITS:
        raise UserError(
            f"{where}: sink_logit must be one of {', '.join(SINK_LOGITS)}, got {value!r}; "
            "download the file again"
        )
    return value


def _ids(
    key: str, generation: Mapping[str, Any], raw: Mapping[str, Any], where: Path
) -> tuple[int, ...]:
    """Token ids under `key`, one or a list; generation_config.json wins over config.json."""
    value = raw[key] if generation.get(key) is None else generation[key]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31:
            raise UserError(f"{where}: {key} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _get(value: object, key: str, default: str) -> object:
    return value.get(key, default) if isinstance(value, dict) else default
