"""The sampling settings that a model is published with, the default of every answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError
from jaxkv.models.gguf.header import Header
from jaxkv.models.hf.folder import read_json
from jaxkv.sampling import TEMPERATURE, Sampling

FILE = "generation_config.json"
# Field of Sampling -> field of a GGUF header.
GGUF = {
    name: f"general.sampling.{theirs}"
    for name, theirs in {
        "temperature": "temp",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }.items()
}


def read_sampling(folder: Path) -> Sampling:
    """The settings in generation_config.json; `do_sample: false` is greedy decoding.

    Raises UserError for values that cannot be used.
    """
    found = read_json(Path(folder) / FILE)
    greedy = {"temperature": 0.0} if found.get("do_sample") is False else {}
    return _sampling({name: found.get(name) for name in GGUF} | greedy, Path(folder) / FILE)


def sampling_of_gguf(header: Header) -> Sampling:
    """The settings in the header of a GGUF file; raises UserError as `read_sampling`."""
    found = {}
    for name, theirs in GGUF.items():
        value, kind = header.fields.get(theirs), int if name == "top_k" else float
        # Some files store 1 as a temperature, or 50.0 as top_k.
        if type(value) is int or (type(value) is float and value.is_integer()):
            value = kind(value)
        found[name] = None if value is None else header.checked(theirs, value, kind)
    return _sampling(found, header.path)


def _sampling(found: Mapping[str, Any], where: Path) -> Sampling:
    given = {name: value for name, value in found.items() if value is not None}
    top_k = given.get("top_k")
    if (isinstance(top_k, float) and top_k.is_integer()) or top_k == -1:
        given["top_k"] = max(0, int(top_k))  # some models publish 50.0, or -1 for no limit
    try:
        return Sampling(**{"temperature": TEMPERATURE} | given)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
