"""The recipe in a record, whose fields may have older names."""

from __future__ import annotations

from typing import Any

RENAMED = {  # the present name of a field, by its older one
    "rows": "batch_size",
    "accumulate": "grad_accum_steps",
    "last_lr": "final_lr_ratio",
    "look_every": "eval_every",
}


def recipe_of_record(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a record, with the present names of its fields."""
    return {RENAMED.get(name, name): value for name, value in recipe.items()}
