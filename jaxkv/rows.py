"""The rows of a cache: their form, floats in the dtype of the spec or `Int8Rows`, and their number.

A row is the key or the value of one token in one KV head. `storage=int8` stores it as whole numbers
from -127 to 127 and one scale. It is rounded once, when the token enters the cache, and a key is
rotated before that. Moves between slots copy whole numbers and scale, so a row never drifts.

Every query reads a token as it is stored, its own token and those of its chunk too. So the output
does not depend on chunking. Rows in int8 pass no gradient to their tokens.

Both arrays of `Int8Rows` have the slots on axis 2, so storage handles rows of either form with
`jax.tree.map`. Attention multiplies logits by the scales of keys, and weights by those of values:
decoding on a CPU makes no float copy of the cache (jaxkv/platform/cpu.py). Before jax 0.12 it makes
one, of one layer at a time. A sample whose keys are rotated to positions in the cache is copied at
each token, in a layer at a time, on every version.

More tokens than slots in a cache that evicts nothing raise UserError. Inside a compiled call
nothing can be raised, so the count becomes OVERFULL and the sequence outputs NaN from then on: lost
tokens cannot go unnoticed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Leaf, Spec
from jaxkv.defaults import POLICY
from jaxkv.errors import UserError, check_choice, check_int
from jaxkv.typing import Array, BFloat16, Bool, Float, Float32, Int8, Int32

Storage = Literal["float", "int8"]  # the field `storage` of a policy
LARGEST = 127
MAX_SLOTS = 2**30
# The count of a sequence that got more tokens than it has slots, where nothing is evicted.
OVERFULL = 2**31 - 1
_SMALLEST = np.float32(2**-126)  # a scale below it would be flushed to 0, and 0 / 0 is NaN


class Int8Rows(NamedTuple):
    """Row s is values[s] * scale[s]. An empty slot is 0.

    A row with a NaN or an infinity has the scale NaN, so all of it reads as NaN.
    """

    values: Int8[Array, "B K S H"]
    scale: BFloat16[Array, "B K S 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


Rows = Array | Int8Rows


def check(storage: str) -> None:
    """Raise UserError unless `storage` names a form of rows."""
    check_choice("storage", storage, ("float", "int8"))


def zeros(spec: Spec, batch: int, slots: int, storage: Storage) -> tuple[Rows, Rows]:
    """Empty slots for keys and for values. They share no buffer, so that a state can be donated."""
    shape = batch, spec.kv_heads, slots

    def empty() -> Rows:
        if storage == "float":
            return jnp.zeros((*shape, spec.head_dim), spec.dtype)
        values = jnp.zeros((*shape, spec.head_dim), jnp.int8)
        return Int8Rows(values, jnp.zeros((*shape, 1), jnp.bfloat16))

    return empty(), empty()


def leaf(storage: Storage, like: Leaf) -> Leaf | Int8Rows:
    """The leaves of rows; like: the leaf of the same rows in floats."""
    return like if storage == "float" else Int8Rows(like, replace(like, axes=f"{like.axes[:-1]}Z"))


def nbytes(spec: Spec, storage: Storage) -> int:
    """Bytes of the key and the value of one token in one KV head."""
    return spec.kv_bytes if storage == "float" else 2 * (spec.head_dim + 2)


def quantise(rows: Float[Array, "B K S H"]) -> Int8Rows:
    """Round each row to the nearest multiples of its scale, its largest absolute value over 127.

    No element moves by more than half a scale. The scale is rounded to bfloat16 before the row is
    divided by it, so the rounding of the scale adds no error. Gradients stop here.
    """
    wide = jax.lax.stop_gradient(rows).astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / np.float32(LARGEST)
    finite = jnp.isfinite(scale)
    scale = jnp.where(finite, jnp.maximum(scale, _SMALLEST), jnp.nan)
    # XLA may drop a conversion to bfloat16 and back, but not this.
    scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)
    steps = jnp.where(finite, jnp.clip(jnp.rint(wide / scale), -LARGEST, LARGEST), 0)
    return Int8Rows(steps.astype(jnp.int8), scale.astype(jnp.bfloat16))


def dequantise(rows: Rows) -> Float[Array, "B K S H"]:
    """Rows as floats: float32 if they are in int8, as they are if they are not."""
    if not isinstance(rows, Int8Rows):
        return rows
    return rows.values.astype(jnp.float32) * rows.scale.astype(jnp.float32)


def store(rows: Float[Array, "B K S H"], like: Rows) -> Rows:
    """New rows in the form of those of a cache."""
    return quantise(rows) if isinstance(like, Int8Rows) else rows.astype(like.dtype)


def unit(x: Float[Array, "B K S H"]) -> Float[Array, "B K S H"]:
    """Rows of length 1; a zero row stays zero."""
    length = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.where(length == 0, 1.0, length)


def wrong_scales(rows: Int8Rows) -> Float32[np.ndarray, " X"]:
    """The scales, as a numpy array, that are negative, not finite, or 0 in an occupied slot.

    The scale 0 means an empty slot, whose values are all 0: `quantise` gives a row of zeros the
    scale _SMALLEST.
    """
    scale = np.asarray(rows.scale, np.float32)[..., 0]
    occupied = np.asarray(rows.values).any(axis=-1)
    right = (scale > 0) | (~occupied & (scale == 0))
    return scale[~right | ~np.isfinite(scale)]


def cut(rows: Rows, start: int, stop: int) -> Rows:
    """The slots start .. stop-1."""
    return jax.tree.map(lambda leaf: leaf[:, :, start:stop], rows)


def times(rows: Rows, by: Float[Array, "B K S 1"]) -> Rows:
    """Each row times a number. A power of two does not round a row in int8 again."""
    if not isinstance(rows, Int8Rows):
        return (rows.astype(jnp.float32) * by).astype(rows.dtype)
    return rows._replace(scale=(rows.scale.astype(jnp.float32) * by).astype(jnp.bfloat16))


def check_sizes(sinks: int, window: int, start: int, example: str) -> None:
    """Raise UserError for impossible sinks, window or first slots.

    example: valid settings, for the message.
    """
    if sinks < 0 or window < 1 or start < 1 or max(sinks, window, start) > MAX_SLOTS:
        raise UserError(
            f"sinks must be 0 or more, window and start at least 1, all {MAX_SLOTS} at most, got "
            f"{sinks}, {window} and {start}; try {example}"
        )


def slots_for(tokens: int, start: int, max_slots: int = MAX_SLOTS) -> int:
    """The number of slots for `tokens` tokens: `start`, or 1, doubled as often as needed.

    Raises UserError for more tokens than `max_slots`.
    """
    check_int("tokens", tokens, 0)
    if tokens <= start:
        return start
    if tokens > max_slots:
        raise UserError(
            f"a growing cache holds at most {max_slots} tokens and {tokens} are needed; raise "
            f"max where the policy has one, or use a policy of constant memory such as {POLICY}"
        )
    size = max(start, 1)
    while size < tokens:
        size = min(2 * size, max_slots)
    return size


def check_room(count: Int32[Array, " B"], valid: Bool[Array, "B T"], slots: int) -> None:
    """Raise UserError for tokens that do not fit. Does nothing in a trace: counts are unknown."""
    if isinstance(count, jax.core.Tracer) or isinstance(valid, jax.core.Tracer):
        return
    # In numpy: inside a trace JAX would stage the sum, whatever the arrays are.
    needed = int((np.asarray(count, np.int64) + np.asarray(valid).sum(axis=1)).max())
    if needed >= OVERFULL:
        raise UserError(
            f"a sequence got more tokens than its {slots} slots in a compiled call, and they are "
            "lost; begin again with policy.init, and reserve before each call"
        )
    if needed > slots:
        raise UserError(
            f"a sequence has {slots} slots and {needed} are needed; make room first: "
            f"state = policy.reserve(spec, state, {needed})"
        )
