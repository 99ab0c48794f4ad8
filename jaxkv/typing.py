"""Axis letters and array types.

B batch, T new tokens, S slots, N query heads, K KV heads, G = N/K, H head dim, D width,
F MLP width, V vocabulary, L layers.

jaxtyping is optional. With it (the extra `dev`) shapes are checked at run time. Without it the
annotations are plain `jax.Array`, so the core needs only jax and numpy.
"""

from __future__ import annotations

from typing import Any

from jax import Array

try:
    from jaxtyping import (
        BFloat16,
        Bool,
        Float,
        Float16,
        Float32,
        Int8,
        Int32,
        Integer,
        UInt8,
        UInt32,
    )
except ImportError:

    class _Plain:
        def __class_getitem__(cls, item: Any) -> Any:
            return item[0]

    BFloat16 = Bool = Float = Float16 = Float32 = Int8 = Int32 = Integer = UInt8 = UInt32 = _Plain  # type: ignore[assignment,misc]

__all__ = [
    "Array",
    "BFloat16",
    "Bool",
    "Float",
    "Float16",
    "Float32",
    "Int8",
    "Int32",
    "Integer",
    "UInt8",
    "UInt32",
]
