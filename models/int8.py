"""Weights in int8: symmetric, with one scale per output channel.

The scale of a row is its largest absolute value over 127, so a product with the row is scaled
afterwards. Norms and biases stay as they are: they are small. Decoding is limited by the bytes of
the weights, which are a quarter of those in float32. On a CPU that other programs use, decoding can
be slower than in float32, because a step has twice as many parallel sections (not recorded).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError
from jaxkv.typing import Array, Float, Float32, Int8, Int32

MATRICES = ("q", "k", "v", "o", "gate", "up", "down", "embed", "head")
LARGEST = 127


class Quantised(NamedTuple):
    """A matrix: row o is values[o] * scale[o]. Its dtype is that of its products' inputs."""

    values: Int8[Array, "O I"]
    scale: Float32[Array, " O"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def is_matrix(name: str) -> bool:
    """Whether a weight of this name is quantised."""
    return name.rsplit(".", 1)[-1] in MATRICES


def quantise(name: str, weight: Float[np.ndarray, "O I"]) -> Quantised:
    """Round to the nearest multiple of the scale of each row; name: for messages.

    Raises UserError for weights that are not finite.
    """
    wide = np.asarray(weight, np.float32)
    largest = np.max(np.abs(wide), axis=1)
    if not np.isfinite(largest).all():
        raise UserError(
            f"weights in int8 must be finite, and {name} has NaN or infinity; check the model"
        )
    scale = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    return Quantised(np.rint(wide / scale[:, None]).astype(np.int8), scale)


def shapes(shape: tuple[int, ...]) -> Quantised:
    """The shapes of a quantised matrix, in place of its arrays."""
    return Quantised(
        jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:1], jnp.float32)
    )


def rows(weight: Quantised, index: Int32[Array, "..."], dtype: jnp.dtype) -> Array:
    """Rows of the matrix, as an embedding."""
    found = jnp.take(weight.values, index, axis=0).astype(jnp.float32)
    return (found * jnp.take(weight.scale, index)[..., None]).astype(dtype)
