"""The sampling settings that a model is published with, the default of every answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError
from jaxkv.models.loading import known_fields
from jaxkv.models.loading.gguf.header import Header
from jaxkv.models.loading.hf.folder import read_json
from jaxkv.sampling import TEMPERATURE, Sampling

FILE, PREFIX = "generation_config.json", "general.sampling."
# Field of Sampling -> field of a GGUF header.
GGUF = {
    name: PREFIX + key
    for name, key in {
        "temperature": "temp",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }.items()
}


def read_sampling(folder: Path) -> Sampling:
    """The settings in generation_config.json; `do_sample: false` is greedy decoding.

    As in transformers 4, those of config.json count where that file is absent. Warns of settings
    that have no effect here. Raises UserError for values that cannot be used.
    """
    where = Path(folder) / FILE
    settings = read_json(where)
    if not where.is_file():
        where = Path(folder) / "config.json"
        names = known_fields.SAMPLED | set(known_fields.NEUTRAL_SAMPLING)
        settings = {name: value for name, value in read_json(where).items() if name in names}
    known_fields.warn_of_sampling(
        settings,
        known_fields.NEUTRAL_SAMPLING,
        known_fields.SAMPLED | known_fields.HARMLESS_SAMPLING,
        where,
    )
    greedy = {"temperature": 0.0} if settings.get("do_sample") is False else {}
    return _sampling({name: settings.get(name) for name in GGUF} | greedy, where)


def sampling_of_gguf(header: Header) -> Sampling:
    """The settings in the header of a GGUF file; raises UserError as `read_sampling`."""
    settings = {
        name.removeprefix(PREFIX): value
        for name, value in header.fields.items()
        if name.startswith(PREFIX)
    }
    known_fields.warn_of_sampling(
        settings,
        known_fields.GGUF_NEUTRAL_SAMPLING,
        known_fields.GGUF_SAMPLED | known_fields.GGUF_HARMLESS_SAMPLING,
        header.path,
    )
    fields = {}
    for name, key in GGUF.items():
        value, kind = header.fields.get(key), int if name == "top_k" else float
        # Some files store 1 as a temperature, or 50.0 as top_k.
        if type(value) is int or (type(value) is float and value.is_integer()):
            value = kind(value)
        fields[name] = None if value is None else header.checked(key, value, kind)
    return _sampling(fields, header.path)


def _sampling(fields: Mapping[str, Any], where: Path) -> Sampling:
    settings = {name: value for name, value in fields.items() if value is not None}
    top_k = settings.get("top_k")
    if (isinstance(top_k, float) and top_k.is_integer()) or top_k == -1:
        settings["top_k"] = max(0, int(top_k))  # some models publish 50.0, or -1 for no limit
    try:
        return Sampling(**{"temperature": TEMPERATURE} | settings)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
