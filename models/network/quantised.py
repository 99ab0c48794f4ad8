"""Matrices in int8 and int4, which are converted to floats in each product.

Each decoding step reads all weights. Norms and biases stay as they are: they are small.

int8: symmetric, one scale per output channel. A row's scale is its largest absolute value over 127.
int4: 32 inputs of an output channel are multiples 0 to 15 of a scale, added to their minimum, as in
Q4_1 of GGUF files. A block of such a file that uses both 0 and 15, as llama.cpp's do, has the same
values here, in float32. With int4, the embedding, the output head and matrices whose shape does not
divide are in int8.

On a CPU that other programs use, decoding can be slower than in float32, because a step has twice
as many parallel sections (not recorded).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError
from jaxkv.platform import cpu as xla_cpu
from jaxkv.typing import Array, Float, Float16, Float32, Int8, Int32, UInt8

Format = Literal["int8", "int4"]
FORMATS = ("int8", "int4")
EMBEDDINGS = ("embed", "head")
EXPERTS = ("expert_gate", "expert_up", "expert_down")  # [E,O,I]: E matrices
MATRICES = ("q", "k", "v", "o", "gate", "up", "down", *EXPERTS, *EMBEDDINGS)
INT8_MAX = 127
INT8_MIN_SCALE = np.finfo(np.float32).tiny
BLOCK = 2**20  # elements that are rounded to int8 at a time
INT4_MAX = 15
INT4_MAX_WEIGHT = float(np.finfo(np.float16).max)  # scale and minimum are in float16
GROUP = 32  # inputs that share a scale in int4


class Int8Matrix(NamedTuple):
    """A matrix: row o is values[o] * scale[o]."""

    values: Int8[Array, "O I"]
    scale: Float32[Array, " O"]

    FORMAT = "int8"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


class Int4Matrix(NamedTuple):
    """A matrix of 2 R rows: row r is in the low four bits of packed[r], row R + r in the high ones.

    Inputs g GROUP to (g + 1) GROUP of row h R + r are multiples of scale[r, h, g], plus
    minimum[r, h, g].
    """

    packed: UInt8[Array, "R I"]
    scale: Float16[Array, "R 2 G"]
    minimum: Float16[Array, "R 2 G"]

    FORMAT = "int4"

    @property
    def shape(self) -> tuple[int, ...]:
        return 2 * self.packed.shape[0], self.packed.shape[1]


Quantised = Int8Matrix | Int4Matrix


def is_matrix(name: str) -> bool:
    """Whether a weight of this name is quantised."""
    return _kind(name) in MATRICES


def quantise(
    name: str, weight: Float[np.ndarray, "O I"], weight_format: Format, source: str = ""
) -> Quantised:
    """Round a matrix to the nearest multiples.

    name: the weight's name; with the shape it decides whether int4 is possible. source: what error
    messages call the weight, by default its name.
    Raises UserError for weights that are not finite, and for int4 beyond float16.
    """
    wide, source = np.asarray(weight, np.float32), source or name
    if not np.isfinite(wide).all():
        raise UserError(
            f"weights in {weight_format} must be finite, and {source} has NaN or infinity; check "
            "the model"
        )
    if wide.ndim == 3:
        matrices = [quantise(name, matrix, weight_format, source) for matrix in wide]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *matrices)
    if _format(name, wide.shape, weight_format) == "int8":
        return _in_int8(wide)
    largest = np.max(np.abs(wide))
    if largest > INT4_MAX_WEIGHT:
        raise UserError(
            f"weights in int4 must be at most {INT4_MAX_WEIGHT:,.0f}, and {source} has "
            f"{largest:,.0f}; choose int8"
        )
    return _in_int4(wide)


def _in_int8(weight: Float32[np.ndarray, "O I"]) -> Int8Matrix:
    matrix = Int8Matrix(np.empty(weight.shape, np.int8), np.empty(len(weight), np.float32))
    # In blocks of rows: a copy of a whole embedding as floats would double the peak of loading.
    size = max(1, BLOCK // weight.shape[1])
    for at in range(0, len(weight), size):
        part = slice(at, at + size)
        matrix.values[part], matrix.scale[part] = _rows_in_int8(weight[part])
    return matrix


def _rows_in_int8(
    weight: Float32[np.ndarray, "R I"],
) -> tuple[Float32[np.ndarray, "R I"], Float32[np.ndarray, " R"]]:
    """The whole numbers and the scale of each row."""
    scale = np.max(np.abs(weight), axis=1) / np.float32(INT8_MAX)
    # XLA reads a subnormal scale as 0, so a row with such a scale becomes zeros.
    normal = scale >= INT8_MIN_SCALE
    scale = np.where(normal, scale, np.float32(1))
    return np.rint(weight / scale[:, None]) * normal[:, None], scale


def _in_int4(weight: Float32[np.ndarray, "O I"]) -> Int4Matrix:
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP)
    minimum, scale = _grid(groups.min(axis=-1), groups.max(axis=-1))
    wide = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
    values = np.rint((groups - minimum.astype(np.float32)[..., None]) / wide)
    values = np.clip(values, 0, INT4_MAX).astype(np.uint8).reshape(weight.shape)
    low, high = np.split(values, 2)
    by_row = (np.stack(np.split(a, 2), axis=1) for a in (scale, minimum))
    return Int4Matrix(low | high << 4, *by_row)


def _grid(
    smallest: Float32[np.ndarray, "O G"], largest: Float32[np.ndarray, "O G"]
) -> tuple[Float16[np.ndarray, "O G"], Float16[np.ndarray, "O G"]]:
    """The minimum and the scale of each group, such that no weight is clipped.

    The nearest numbers in float16 clip a weight only where float16 is coarse: beside a large
    minimum, and below its normal numbers. There the minimum is the next lower number, and the scale
    the next higher one.
    """

    def nearest_scale(minimum: np.ndarray) -> np.ndarray:
        return ((largest - minimum) / INT4_MAX).astype(np.float16)

    minimum, scale = smallest.astype(np.float16), nearest_scale(smallest)
    above = minimum - smallest > scale.astype(np.float32) / 2
    with np.errstate(over="ignore"):  # of the lowest number, which is above no weight
        minimum = np.where(above, np.nextafter(minimum, np.float16(-np.inf)), minimum)

    def clips(scale: np.ndarray) -> np.ndarray:
        return largest - minimum > (INT4_MAX + 0.5) * scale.astype(np.float32)

    scale = np.where(clips(scale), nearest_scale(minimum), scale)
    return minimum, np.where(clips(scale), np.nextafter(scale, np.float16(np.inf)), scale)


def shapes(name: str, shape: tuple[int, ...], weight_format: Format) -> Quantised:
    """The shapes of a quantised matrix, or of several, in place of its arrays."""
    *experts, outputs, inputs = shape
    if _format(name, shape[-2:], weight_format) == "int8":
        return Int8Matrix(
            jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
        )
    rows = outputs // 2
    group = jax.ShapeDtypeStruct((*experts, rows, 2, inputs // GROUP), jnp.float16)
    return Int4Matrix(jax.ShapeDtypeStruct((*experts, rows, inputs), jnp.uint8), group, group)


def _format(name: str, shape: tuple[int, ...], weight_format: Format) -> Format:
    """The format of a matrix of a model whose weights are in `weight_format`."""
    divides = shape[0] % 2 == 0 == shape[1] % GROUP
    return weight_format if divides and _kind(name) not in EMBEDDINGS else "int8"


def _kind(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def rows(weight: Int8Matrix, index: Int32[Array, "..."], dtype: jnp.dtype) -> Array:
    """Rows of the matrix, as an embedding."""
    unscaled = jnp.take(weight.values, index, axis=0).astype(jnp.float32)
    return (unscaled * jnp.take(weight.scale, index)[..., None]).astype(dtype)


def linear(x: Float[Array, "B T I"], weight: Quantised, dtype: jnp.dtype) -> Float[Array, "B T O"]:
    """x @ weight.T, accumulated in float32."""
    if isinstance(weight, Int8Matrix):
        y = xla_cpu.linear_by_blocks(x, weight.values, _linear_int8, weight.values.size)
        return (y * weight.scale[None, None]).astype(dtype)
    y = xla_cpu.linear_by_blocks(x, weight, _linear_int4, 2 * weight.packed.size)
    return y.swapaxes(2, 3).reshape(*x.shape[:2], -1).astype(dtype)


def dense(weight: Quantised) -> Float32[Array, "O I"]:
    """The matrix in float32."""
    if isinstance(weight, Int8Matrix):
        return weight.values.astype(jnp.float32) * weight.scale[:, None]
    halves = (weight.packed & 15, weight.packed >> 4)
    return jnp.concatenate([
        _widened(values, weight.scale[:, half], weight.minimum[:, half])
        for half, values in enumerate(halves)
    ])  # fmt: skip


def _linear_int8(x: Float[Array, "B T I"], values: Int8[Array, "O I"]) -> Float32[Array, "B T O"]:
    return xla_cpu.linear(x, xla_cpu.in_loop(values, x).astype(x.dtype), jnp.float32)


def _linear_int4(x: Float[Array, "B T I"], weight: Int4Matrix) -> Float32[Array, "B T R 2"]:
    packed = xla_cpu.in_loop(weight.packed, x)
    halves = (
        _widened(values, weight.scale[:, half], weight.minimum[:, half]).astype(x.dtype)
        for half, values in enumerate((packed & 15, packed >> 4))
    )
    return jnp.stack([xla_cpu.linear(x, half, jnp.float32) for half in halves], axis=-1)


def _widened(
    values: UInt8[Array, "R I"], scale: Float16[Array, "R G"], minimum: Float16[Array, "R G"]
) -> Float32[Array, "R I"]:
    scale, minimum = (a.astype(jnp.float32)[..., None] for a in (scale, minimum))
    groups = values.astype(jnp.float32).reshape(*scale.shape[:2], GROUP)
    return (groups * scale + minimum).reshape(values.shape)
