"""Members of the contract before `update`, and what replaces each: for policies written for it."""

from __future__ import annotations

from jaxkv.errors import UserError

_UPDATE = "one update(spec, state, chunk) -> (Partial, state)"
_LEAVES = "leaves, a Leaf for each array"
REPLACED_BY = {
    "attend": _UPDATE,
    "extend": _UPDATE,
    "decode": _UPDATE,
    "take": _UPDATE,
    "needs_scores": _UPDATE,
    "kept": "cached",
    "axes": _LEAVES,
    "shared": _LEAVES,
    "appends": _LEAVES,
    "settling": _LEAVES,
    "settled": _LEAVES,
    "on_host": _LEAVES,
    "formula": "bytes_per_sequence",
    "seal": "finish_prefill",
    "of_layer": "for_layer",
    "reach": "max_lookback",
    "least": "min_prompt",
}


def refuse_old_members(kind: type) -> None:
    """Raise UserError for a class of the older contract, also if it has `update` by now.

    Every such class has `attend` and `extend`. Other old names are good names of helpers.
    """
    if not (hasattr(kind, "attend") and hasattr(kind, "extend")):
        return
    by_new: dict[str, list[str]] = {}
    for old, new in REPLACED_BY.items():
        if hasattr(kind, old):
            by_new.setdefault(new, []).append(old)
    remedy = ", ".join(f"replace {' and '.join(old)} by {new}" for new, old in by_new.items())
    raise UserError(
        f"{kind.__name__} has members of an older contract: subclass jaxkv.Policy and {remedy}"
    )
