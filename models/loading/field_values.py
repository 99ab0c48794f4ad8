"""Values of config.json, checked: each function raises UserError with the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError

# Larger values mean a damaged file, which must not exhaust the memory.
MAX_VALUES = {"num_hidden_layers": 10_000, "head_dim": 65_536, "num_attention_heads": 65_536}


def integer(raw: Mapping[str, Any], key: str, where: Path, minimum: int = 1) -> int:
    """The whole number in a field, at least `minimum`."""
    value = required(raw, key, where)
    maximum = MAX_VALUES.get(key, 2**31 - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise UserError(
            f"{where}: {key} must be a whole number from {minimum} to {maximum}, got {value!r}; "
            "download the file again"
        )
    return value


def positive(raw: Mapping[str, Any], key: str, where: Path) -> float:
    """The number above 0 in a field."""
    value = required(raw, key, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise UserError(
            f"{where}: {key} must be a positive number, got {value!r}; download the file again"
        )
    return float(value)


def boolean(raw: Mapping[str, Any], key: str, where: Path) -> bool:
    """The truth value of a field."""
    value = required(raw, key, where)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key} must be true or false, got {value!r}; correct it")
    return value


def required(raw: Mapping[str, Any], key: str, where: Path) -> Any:
    """The value of a field that must be there."""
    if key not in raw:
        raise UserError(f"{where}: missing field {key}; download the file again")
    return raw[key]
