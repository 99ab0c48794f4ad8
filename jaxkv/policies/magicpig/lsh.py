"""SimHash codes, and the probability that MagicPIG samples a key.

A SimHash is one bit: the side of a plane on which a vector lies. A key and a query agree in it with
probability p = 1 - acos(c)/pi, where c is the cosine of their angle, and in all K bits of a table
with P = p^K. A key is sampled if they agree in at least two of L tables (2410.16179,
section 4.3, eq. 10). The vector extension of eq. 8 is not applied: key norms do not influence u.
All probabilities are over the draw of the planes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import draws
from jaxkv.attention import batched_dot
from jaxkv.errors import UserError
from jaxkv.pallas_kernels import host_memory
from jaxkv.pallas_kernels.sampled_attention import Angles
from jaxkv.typing import Array, Float, Float32, Int32, UInt32

MOST_BITS = 16  # a code is stored in two bytes
MOST_TABLES = 4096
# Abramowitz and Stegun 4.4.46: acos(x) = sqrt(1 - x) times this, within 2e-8 for x from 0 to 1.
_ACOS = (
    1.5707963050, -0.2145988016, 0.0889789874, -0.0501743046,
    0.0308918810, -0.0170881256, 0.0066700901, -0.0012624911,
)  # fmt: skip
_FEW = 16
_RARE = 0.1  # tables that agree, on average, below which u is a power series in P


@dataclass(frozen=True)
class Hashing:
    """bits: K of a table. tables: L.

    u_floor: added to u where a key is weighted, 1e-4 in the published code and 0 in the paper.
    """

    bits: int = 10
    tables: int = 150
    u_floor: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MOST_BITS:
            raise UserError(f"K must be from 1 to {MOST_BITS}, got {self.bits}; try K=10")
        if not 2 <= self.tables <= MOST_TABLES:
            raise UserError(f"L must be from 2 to {MOST_TABLES}, got {self.tables}; try L=150")
        if not 0 <= self.u_floor < 1:
            raise UserError(f"u_floor must be from 0 to less than 1, got {self.u_floor}; try 1e-4")

    def __call__(self, cosine: Float32[Array, "..."]) -> Float32[Array, "..."]:
        """The log weight of a key that was sampled, -log(u + u_floor)."""
        log_u = log_inclusion(cosine, self)
        return -jnp.logaddexp(log_u, np.float32(math.log(self.u_floor))) if self.u_floor else -log_u


def log_inclusion(cosine: Float32[Array, "..."], hashing: Hashing) -> Float32[Array, "..."]:
    """log u, u = 1 - (1-P)^L - L P (1-P)^(L-1).

    That is the regularised incomplete beta I_P(2, L - 1). Evaluated as written it cancels to zero
    in float32 for small P. Here log u is within 5e-5 in float32 for every cosine.
    """
    tables = hashing.tables
    log_p = np.float32(hashing.bits) * jnp.log(_agreement(cosine))  # of P
    p, count = jnp.exp(log_p), np.float32(tables)
    # Where fewer than _RARE tables agree on average: the power series of I_P, leading term factored
    # out.
    a = tables - 2
    nobody = jnp.log1p(-jnp.minimum(p, np.float32(1 - 2**-24)))
    series = (
        -2 * a / 3,
        a * (a - 1) / 4,
        -a * (a - 1) * (a - 2) / 15,
        a * (a - 1) * (a - 2) * (a - 3) / 72,
    )
    rest = np.float32(tables - 1) * nobody + jnp.log1p(np.float32(tables - 1) * p)
    rare = jnp.minimum(p, np.float32(_RARE / tables))
    tail = jnp.zeros_like(rare)
    for factor in reversed(series):
        tail = rare * (np.float32(factor) + tail)
    log_rare = np.float32(2) * log_p + np.float32(math.log(math.comb(tables, 2)))
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


def log_weights(
    k: Float[Array, "B K S H"],
    q: Float[Array, "B N H"],
    slots: Int32[Array, "B N M"],
    angles: Angles,
    hashing: Hashing,
) -> Float32[Array, "B N M"]:
    """The log weights of these slots of k, a head at a time: all of them at once would be large."""
    kv_heads, size, head_dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    keys, norms = k.reshape(-1, head_dim), angles.norms.reshape(-1)

    def weigh_head(arguments: tuple[Array, ...]) -> Array:
        head, q, slots, shift, length = arguments
        at = head // group * size + slots
        selected = host_memory.take(keys, at).astype(jnp.float32)
        dot = jnp.dot(selected, q, precision="highest") - shift
        product = host_memory.take(norms, at) * length
        return hashing(jnp.where(product > 0, dot / jnp.where(product > 0, product, 1), 0))

    flat = lambda a: a.reshape(-1, *a.shape[2:])
    heads = jnp.arange(q.shape[0] * q.shape[1])
    head_arguments = (
        heads,
        flat(q.astype(jnp.float32)),
        flat(slots),
        angles.shift.reshape(-1),
        flat(angles.length),
    )
    return jax.lax.stop_gradient(jax.lax.map(weigh_head, head_arguments).reshape(slots.shape))


def planes(
    rng: UInt32[Array, "B K 2"], head_dim: int, hashing: Hashing
) -> Float32[Array, "B K H R"]:
    """R = L * K directions, normal in every coordinate (Box and Muller)."""
    count = head_dim * hashing.tables * hashing.bits
    number = jnp.arange(count, dtype=jnp.uint32)[None, None]
    radius = jnp.sqrt(-2 * jnp.log1p(-draws.uniforms(2 * number, rng)))
    angle = np.float32(2 * math.pi) * draws.uniforms(2 * number + 1, rng)
    return (radius * jnp.cos(angle)).reshape(*rng.shape[:2], head_dim, -1)


def codes(
    x: Float[Array, "X S H"], planes: Float32[Array, "X H R"], hashing: Hashing
) -> Int32[Array, "X L S"]:
    """In each table the K bits of every vector, that of the first plane lowest."""
    count = x.shape[1]
    if count <= _FEW:  # vectors first: a few of them are one pass over the planes
        products = batched_dot(x.astype(jnp.float32), planes, contract=(2, 1))  # [X,S,R]
        products = products.reshape(-1, count, hashing.tables, hashing.bits).transpose(0, 2, 3, 1)
    else:
        products = batched_dot(planes, x.astype(jnp.float32), contract=(1, 2))  # [X,R,S]
        products = products.reshape(-1, hashing.tables, hashing.bits, count)
    place = np.int32(1) << np.arange(hashing.bits, dtype=np.int32)[None, None, :, None]
    return jnp.sum(jnp.where(products > 0, place, 0), axis=2, dtype=jnp.int32)
