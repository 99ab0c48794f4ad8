"""SimHash tables as MagicPIG samples by them: planes, codes, and the chance that a key is found.

A key and a query agree in one bit with the chance p = 1 - acos(c)/pi, c being the cosine of their
angle; in all K bits of a table with P = p^K; and a key is sampled when they agree in at least
`least` of L tables (2410.16179, section 4.2). All chances are over the draw of the planes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxkv import sample as drawn
from jaxkv.attention import batched_dot
from jaxkv.errors import UserError
from jaxkv.typing import Array, Float, Float32, Int32, UInt32

MOST_BITS = 16  # a code is kept in two bytes
MOST_TABLES = 4096
# Abramowitz and Stegun 4.4.46: acos(x) = sqrt(1 - x) times this, within 2e-8 for x from 0 to 1.
_ACOS = (
    1.5707963050, -0.2145988016, 0.0889789874, -0.0501743046,
    0.0308918810, -0.0170881256, 0.0066700901, -0.0012624911,
)  # fmt: skip
_RARE = 0.1  # tables that agree, on average, below which u is a power series in P


@dataclass(frozen=True)
class Hashing:
    """bits: K of a table. tables: L. least: in how many a key must agree to be sampled.

    floor: added to u where a key is weighted, 1e-4 in the published code and 0 in the paper.
    """

    bits: int = 10
    tables: int = 150
    least: int = 2
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MOST_BITS:
            raise UserError(f"K must be from 1 to {MOST_BITS}, got {self.bits}; try K=10")
        if not 2 <= self.tables <= MOST_TABLES:
            raise UserError(f"L must be from 2 to {MOST_TABLES}, got {self.tables}; try L=150")
        if self.least not in (1, 2):
            raise UserError(f"min_tables must be 1 or 2, got {self.least}; try min_tables=2")
        if not 0 <= self.floor < 1:
            raise UserError(f"u_floor must be from 0 to less than 1, got {self.floor}; try 1e-4")

    def __call__(self, cosine: Float32[Array, "..."]) -> Float32[Array, "..."]:
        """The log weight of a key that was sampled, -log(u + floor)."""
        log_u = log_inclusion(cosine, self.bits, self.tables, self.least)
        return -jnp.logaddexp(log_u, np.float32(math.log(self.floor))) if self.floor else -log_u


def log_inclusion(
    cosine: Float32[Array, "..."], bits: int, tables: int, least: int = 2
) -> Float32[Array, "..."]:
    """log u, u = 1 - (1-P)^L - L P (1-P)^(L-1); for least 1 without the last term.

    That is the regularised incomplete beta I_P(least, L - least + 1). As it is written it loses
    every digit where it is small; here log u is within 5e-5 in float32 for every cosine.
    """
    log_p = np.float32(bits) * jnp.log(_agreement(cosine))  # of P
    p, count = jnp.exp(log_p), np.float32(tables)
    # Of two tables or more with expected number up to _RARE: the series of I_P, four terms on.
    a = tables - least
    nobody = jnp.log1p(-jnp.minimum(p, np.float32(1 - 2**-24)))
    if least == 1:
        series = (-a / 2, a * (a - 1) / 6, -a * (a - 1) * (a - 2) / 24)
        rest = count * nobody
    else:
        series = (-2 * a / 3, a * (a - 1) / 4, -a * (a - 1) * (a - 2) / 15,
                  a * (a - 1) * (a - 2) * (a - 3) / 72)  # fmt: skip
        rest = np.float32(tables - 1) * nobody + jnp.log1p(np.float32(tables - 1) * p)
    rare = jnp.minimum(p, np.float32(_RARE / tables))
    tail = jnp.zeros_like(rare)
    for factor in reversed(series):
        tail = rare * (np.float32(factor) + tail)
    log_rare = np.float32(least) * log_p + np.float32(math.log(math.comb(tables, least)))
    # 1 - exp(rest) by a tangent: kernels have no expm1.
    half = jnp.tanh(jnp.maximum(-rest, np.float32(1e-7)) / 2)
    often = jnp.log(2 * half / (1 + half))
    return jnp.where(p * count < np.float32(_RARE), log_rare + jnp.log1p(tail), often)


def _agreement(cosine: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """p = 1 - acos(c)/pi with all its digits where it is small too."""
    cosine = jnp.clip(cosine, -1, 1)
    x = jnp.abs(cosine)
    poly = jnp.full_like(x, _ACOS[-1])
    for factor in reversed(_ACOS[:-1]):
        poly = poly * x + np.float32(factor)
    less = jnp.sqrt(1 - x) * poly * np.float32(1 / math.pi)  # acos|c| / pi
    return jnp.maximum(jnp.where(cosine < 0, less, 1 - less), np.float32(1e-30))


def planes(key: UInt32[Array, "B K 2"], head_dim: int, how: Hashing) -> Float32[Array, "B K H F"]:
    """F = L x K directions a row and kv head, normal in every coordinate (Box and Muller)."""
    count = head_dim * how.tables * how.bits
    number = jnp.arange(count, dtype=jnp.uint32)[None, None]
    radius = jnp.sqrt(-2 * jnp.log1p(-drawn.uniforms(2 * number, key)))
    angle = np.float32(2 * math.pi) * drawn.uniforms(2 * number + 1, key)
    return (radius * jnp.cos(angle)).reshape(*key.shape[:2], head_dim, -1)


def codes(
    x: Float[Array, "X S H"], planes: Float32[Array, "X H F"], how: Hashing
) -> Int32[Array, "X L S"]:
    """In each table the K bits of every vector: on which side of the planes it lies."""
    sides = batched_dot(planes, x.astype(jnp.float32), contract=(1, 2)) > 0  # [X,F,S]
    sides = sides.reshape(x.shape[0], how.tables, how.bits, x.shape[1])
    place = np.int32(1) << np.arange(how.bits, dtype=np.int32)
    return jnp.sum(jnp.where(sides, place[None, None, :, None], 0), axis=2, dtype=jnp.int32)
