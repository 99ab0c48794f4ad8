"""Position encodings: rotations (RoPE), distance penalties (ALiBi), or none.

A position encoding is a frozen dataclass with three pure functions:

    encoding.rotate(x [B,T,*,H], positions [B,T] uint32)          -> x, rotated to its position
    encoding.rerotate(x [B,T,*,H], by [B,T] uint32)               -> rotated x, rotated further
    encoding.bias(queries [B,T], keys [B,S], kv_heads) (uint32)   -> [B,K,G,T,S] float32, or None

Where KV heads cache different tokens, queries may be [B,K,T] and keys [B,K,S].

Rotary angles are fixed-point phases: `frequencies` has each frequency as a fraction of a full
rotation in units of 2^-32. So position * frequency wraps exactly in uint32, and the relative angle
of two tokens is the same at position 10 and at position 2^32 - 10. Angles in float32 lose this,
because their rounding error grows with the position. The frequencies themselves have 32 bits; keep
distances in view below about 100,000.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError, check_int
from jaxkv.typing import Array, Float, Float32, UInt32

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class NoPosition:
    """No position encoding: the model learns order from the causal mask alone."""

    def rotate(self, x: Float[Array, "B T X H"], positions: UInt32[Array, "#B T"]) -> Array:
        return x

    def rerotate(self, x: Float[Array, "B T X H"], by: UInt32[Array, "#B T"]) -> Array:
        return x

    def bias(self, queries: Array, keys: Array, kv_heads: int) -> None:
        return None


@dataclass(frozen=True)
class Alibi:
    """ALiBi (Press et al. 2022): a logit falls by slope x distance.

    slopes: one per query head; `Alibi.of(heads)` gives the published geometric series, whose last
    slope is 2^-max_bias. axis: the mesh axis over which the heads are split, inside a shard_map.
    """

    slopes: tuple[float, ...]
    axis: str | None = None

    @staticmethod
    def of(heads: int, max_bias: float = 8) -> Alibi:
        """The slopes of the paper; other than powers of two interleave the next power's."""

        def series(n: int) -> list[float]:
            return [2 ** (-max_bias * (i + 1) / n) for i in range(n)]

        check_int("heads", heads)
        power = 2 ** int(math.log2(heads))
        return Alibi(tuple(series(power) + series(2 * power)[0::2][: heads - power]))

    def rotate(self, x: Float[Array, "B T X H"], positions: UInt32[Array, "#B T"]) -> Array:
        return x

    def rerotate(self, x: Float[Array, "B T X H"], by: UInt32[Array, "#B T"]) -> Array:
        return x

    def bias(
        self, queries: UInt32[Array, "B ... T"], keys: UInt32[Array, "B ... S"], kv_heads: int
    ) -> Float32[Array, "B K G T S"]:
        parts = 1 if self.axis is None else jax.lax.axis_size(self.axis)
        if len(self.slopes) % (parts * kv_heads):
            raise UserError(
                f"ALiBi needs one slope per query head, in groups of equal size: got "
                f"{len(self.slopes)} slopes for {parts * kv_heads} KV heads; give one per head"
            )
        slopes = jnp.asarray(self.slopes, jnp.float32).reshape(parts, 1, kv_heads, -1, 1, 1)
        slopes = slopes[0 if self.axis is None else jax.lax.axis_index(self.axis)]
        queries, keys = (p if p.ndim == 3 else p[:, None] for p in (queries, keys))
        # The difference wraps, so it is the true distance also across 2^32 tokens.
        distance = (queries[:, :, :, None] - keys[:, :, None, :]).astype(jnp.int32)
        return -slopes * distance[:, :, None].astype(jnp.float32)


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021), pairs (i, i + H/2) as in Hugging Face's Llama.

    frequencies: fixed-point, for each pair round(frequency / 2 pi x 2^32), uint32. amplitude:
    multiplies cos and sin (YaRN's attention factor). head_dim: H, where the pairs are of its first
    dims alone, and the others keep their values; None where all are rotated.
    """

    frequencies: tuple[int, ...]
    amplitude: float = 1.0
    head_dim: int | None = None

    def rotate(self, x: Float[Array, "B T X H"], positions: UInt32[Array, "#B T"]) -> Array:
        rotated = 2 * len(self.frequencies)
        if x.shape[-1] != (self.head_dim or rotated):
            raise UserError(
                f"a rotary encoding of {len(self.frequencies)} pairs needs head dim "
                f"{self.head_dim or rotated}, got {x.shape[-1]}; make it by rotary(head_dim, "
                "theta), with rotated= if only the first dims are rotated"
            )
        if self.head_dim is not None:
            whole = replace(self, head_dim=None)
            first = whole.rotate(x[..., :rotated], positions)
            return jnp.concatenate([first, x[..., rotated:]], axis=-1)
        cos, sin = self._cos_sin(positions)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = cos[:, :, None], sin[:, :, None]
        rotated = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

    def rerotate(self, x: Float[Array, "B T X H"], by: UInt32[Array, "#B T"]) -> Array:
        """`rotate` for vectors that have the amplitude already."""
        return replace(self, amplitude=1.0).rotate(x, by)

    def bias(self, queries: Array, keys: Array, kv_heads: int) -> None:
        return None

    def _cos_sin(self, positions: UInt32[Array, "#B T"]) -> tuple[Array, Array]:
        frequencies = jnp.asarray(np.asarray(self.frequencies, np.uint32))
        phase = positions[:, :, None] * frequencies[None, None, :]
        scale = np.float32(self.amplitude)
        return _sine(phase + np.uint32(2**30)) * scale, _sine(phase) * scale


# sin(x pi/2) = x P(x^2) for |x| <= 1 within 5e-9 (Hastings 1955, sheet 16); in float32 also exactly
# 1 at x = 1, so that position 0 rotates nothing.
_SINE = (1.57079631847, -0.64596371106, 0.07968967928, -0.00467376557, 0.00015148419)


def _sine(phase: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """The sine of a phase in units of 2^-32 rotations, within 3e-7.

    A phase is reduced exactly, so ten operations replace jnp.sin. That matters because XLA
    recomputes angles in every fusion that reads them.
    """
    signed = jax.lax.bitcast_convert_type(phase, jnp.int32)
    beyond = (signed >= 2**30) | (signed < -(2**30))
    mirrored = jnp.where(beyond, np.int32(-(2**31)) - signed, signed)  # sin(half a rotation - x)
    x = mirrored.astype(jnp.float32) * np.float32(2**-30)
    square, value = x * x, np.float32(_SINE[-1])
    for coefficient in _SINE[-2::-1]:
        value = value * square + np.float32(coefficient)
    return x * value


Encoding = Rotary | Alibi | NoPosition


def rotary(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, object] | None = None,
    context: int = 2048,
    rotated: int | None = None,
) -> Rotary:
    """The rotary encoding of a Llama-family model.

    head_dim: H, even. theta: the base of the frequencies. context: the model's
    max_position_embeddings, which YaRN uses where its own original length is absent. scaling: None,
    or `kind` (default, linear, llama3, yarn) with Hugging Face's field names. Under every kind,
    `factors` divide the frequency of each pair before it is scaled, and `attention_factor`
    replaces the amplitude, which is 1 except under yarn. rotated: the first dims that are rotated,
    even, as of GPT-NeoX; the others keep their values. None rotates all.
    Raises UserError for another kind, a missing field, or dims that are odd or too many.
    """
    scaling = dict(scaling or {})
    kind = scaling.get("kind", "default")
    if kind not in KINDS:
        raise UserError(f"rope scaling must be one of {', '.join(KINDS)}, got {kind!r}")
    for field, value in scaling.items():
        if isinstance(value, int | float) and not 0 < value < math.inf and value is not False:
            raise UserError(f"rope scaling needs {field} above 0 and finite, got {value!r}")
    low, high = scaling.get("low_freq_factor", 0), scaling.get("high_freq_factor", math.inf)
    if low >= high:
        raise UserError(
            f"rope scaling needs low_freq_factor below high_freq_factor, got {low} and {high}; "
            "download config.json again"
        )
    if not 0 < theta < math.inf:
        raise UserError(
            f"rotary positions need theta above 0 and finite, got {theta}; give the "
            "model's rope_theta"
        )
    check_int("head_dim", head_dim, 2)
    size = head_dim if rotated is None else rotated
    check_int("rotated", size, 2, head_dim)
    if size % 2:
        name = "head dim" if size == head_dim else "number of rotated dims"
        raise UserError(f"rotary positions need an even {name}, got {size}; use {size + 1}")
    frequencies = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    frequencies = frequencies / np.asarray(scaling.get("factors", 1.0), np.float64)
    amplitude = scaling.get("attention_factor") or 1.0
    try:
        if kind == "linear":
            frequencies = frequencies / float(scaling["factor"])
        elif kind == "llama3":
            frequencies = _llama3(frequencies, scaling)
        elif kind == "yarn":
            frequencies, amplitude = _yarn(frequencies, theta, scaling, context)
    except KeyError as missing:
        raise UserError(f"rope scaling {kind!r} needs the field {missing}") from None
    fixed = np.round(frequencies / (2 * math.pi) * 2**32).astype(np.uint64) % 2**32
    part = None if size == head_dim else head_dim
    return Rotary(tuple(int(f) for f in fixed), float(amplitude), part)


def _llama3(frequencies: np.ndarray, scaling: Mapping[str, object]) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched, short ones unchanged, those between blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelengths = 2 * math.pi / frequencies
    rotations_in_context = float(scaling["original_max_position_embeddings"]) / wavelengths
    blend = np.clip((rotations_in_context - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn(
    frequencies: np.ndarray, theta: float, scaling: Mapping[str, object], context: int
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023): NTK by parts, and an attention temperature."""
    original = scaling.get("original_max_position_embeddings") or context
    factor = float(scaling.get("factor") or context / original)
    head_dim = 2 * len(frequencies)

    def pair_with(rotations: float) -> float:
        wavelength = original / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low = pair_with(float(scaling.get("beta_fast") or 32))
    high = pair_with(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(len(frequencies)) - low) / max(high - low, 0.001)
    interpolate = np.clip(ramp, 0.0, 1.0)
    blended = frequencies / factor * interpolate + frequencies * (1 - interpolate)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            amplitude = temperature(float(mscale)) / temperature(float(all_dim))
        else:
            amplitude = temperature(1.0)
    return blended, float(amplitude)
