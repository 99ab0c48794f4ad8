"""The rope settings of config.json: the rotary encoding and the context that they give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError
from jaxkv.rotary import Rotary, rotary

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
}
THETA = 10000.0
STRETCHED = ("linear", "yarn")  # the context is the original length times the factor


def rope_fields(raw: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The rope settings of config.json, from either dialect, under the names of the later one.

    Raises UserError where they are no object, differ between layers, or exclude each other.
    """
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters", ""):
        rope = raw.get(name) or {} if name else {"rope_theta": raw.get("rope_theta")}
        if not isinstance(rope, dict):
            raise UserError(f"{where}: {name} must be an object, got {rope!r:.60}")
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
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"{where}: unsupported rope kind {kind!r}; supported: {', '.join(KINDS)}")
    part = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    if part != 1:
        raise UserError(f"{where}: partial_rotary_factor must be 1 (whole heads), got {part}")
    # The order in which transformers looks for the original length.
    original = raw.get("original_max_position_embeddings")
    original = original or rope.get("original_max_position_embeddings") or context
    rope = {"rope_theta": THETA} | rope
    rope["original_max_position_embeddings"] = original
    required, optional = KINDS[kind]
    missing = [field for field in required if rope.get(field) is None]
    if missing:
        raise UserError(f"{where}: rope kind {kind} lacks the field {', '.join(missing)}")
    scaling = {field: rope[field] for field in required + optional if rope.get(field) is not None}
    theta = rope["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e30:
        raise UserError(
            f"{where}: rope_theta must be a positive number, got {theta!r}; download the file again"
        )
    try:
        encoding = rotary(head_dim, theta, {"kind": kind} | scaling, context)
        stretched = int(original * scaling.get("factor", 1)) if kind in STRETCHED else 0
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: {error}") from None
    return encoding, max(context, stretched)
