"""The memory bandwidth and the rate of float32 products that this machine reaches.

Each limit has several programs, because XLA:CPU does not reach the limit with every shape: it
splits a product of a matrix with a vector so that some cores read less than others. The limit of a
round is that of the program that is fastest in this round. Time them in the same rounds as the
programs that are compared with the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.evals.lib.timing import Variant, timed
from jaxkv.models.network.decoder import matmul
from jaxkv.typing import Array, Float32

VECTOR_SIDES = (4096, 6144, 8192)  # 64 to 256 MiB; a large cache may hold a part of the first
MATRIX_SIDES = (512, 1024, 2048)


class Limit(NamedTuple):
    """Programs by name, and how many bytes or floating-point operations one call needs."""

    variants: dict[str, Variant]
    amounts: dict[str, float]

    def rates(self, seconds: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
        """What each program reaches in each round, per second."""
        return {name: amount / np.array(seconds[name]) for name, amount in self.amounts.items()}

    def best(self, seconds: Mapping[str, Sequence[float]]) -> np.ndarray:
        """The limit of each round, per second."""
        return np.max(list(self.rates(seconds).values()), axis=0)


@jax.jit
def _plain(a: Float32[Array, "M K"], b: Float32[Array, "K ..."]) -> Float32[Array, "M ..."]:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@jax.jit
def _as_in_decoding(a: Float32[Array, "M K"], b: Float32[Array, " K"]) -> Float32[Array, "M 1 1"]:
    return matmul(a, b[:, None, None])


@jax.jit
def _total(a: Float32[Array, "M K"]) -> Float32[Array, ""]:
    return jnp.sum(a)


def bandwidth(sides: Sequence[int] | None = None) -> Limit:
    """Bytes per second that are read from memory.

    The programs are products of square float32 matrices with a vector, in XLA's own form and in
    that of decoding, and the sum of a matrix. sides: sizes of the matrices.
    """
    variants, amounts = {}, {}
    for side in sides or VECTOR_SIDES:
        matrix, vector = jnp.ones((side, side), jnp.float32), jnp.ones((side,), jnp.float32)
        programs = {
            "matrix-vector product": partial(_plain, matrix, vector),
            "matrix-vector product of decoding": partial(_as_in_decoding, matrix, vector),
            "sum": partial(_total, matrix),
        }
        for name, program in programs.items():
            variants[f"{name}, {side}"] = _blocking(program)
            amounts[f"{name}, {side}"] = matrix.nbytes
    return Limit(variants, amounts)


def products(sides: Sequence[int] | None = None) -> Limit:
    """Floating-point operations per second of products of two square float32 matrices.

    sides: sizes of the matrices.
    """
    variants, amounts = {}, {}
    for side in sides or MATRIX_SIDES:
        matrix = jnp.ones((side, side), jnp.float32)
        variants[f"matrix-matrix product, {side}"] = _blocking(partial(_plain, matrix, matrix))
        amounts[f"matrix-matrix product, {side}"] = 2 * side**3
    return Limit(variants, amounts)


def _blocking(program: partial) -> Variant:
    return timed(lambda: jax.block_until_ready(program()))
