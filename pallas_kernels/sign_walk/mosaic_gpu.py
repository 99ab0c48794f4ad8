"""The walk on an NVIDIA GPU in Mosaic, eight walks per program. No GPU has run it yet.

A row of threads walks within one warp, so a step needs no barrier.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from jaxkv.pallas_kernels import mosaic
from jaxkv.pallas_kernels.mosaic import plgpu
from jaxkv.pallas_kernels.sign_walk import reference
from jaxkv.pallas_kernels.sign_walk.reference import sign_of

THREADS = 16  # of a walk
GROUP = mosaic.rows_in_tile(THREADS)  # walks of a program
STEPS = mosaic.VECTOR * THREADS  # the number of steps must be a multiple
MAX_STEPS = 1024  # limited by the registers of a program


def supports(steps: int) -> bool:
    """Whether the kernel supports walks of this many steps, and this jax has Mosaic GPU."""
    return mosaic.is_available() and steps <= MAX_STEPS and steps % STEPS == 0


def walk(gram: Array, thresholds: Array, interpret: object = None) -> tuple[Array, Array]:
    """`reference.walk`, for a multiple of GROUP walks."""
    out = jax.ShapeDtypeStruct(thresholds.shape, jnp.float32)
    return plgpu.kernel(
        _walk_group,
        out_type=[out, out],
        grid=(thresholds.shape[0] // GROUP,),
        grid_names=("group",),
        interpret=interpret,
    )(gram, thresholds)


def _walk_group(gram_ref, thresholds_ref, signs_ref, inner_ref) -> None:
    shape = (GROUP, thresholds_ref.shape[1])
    steps = shape[1]
    layout = mosaic.row_layout(THREADS)
    walks = pl.ds(pl.multiple_of(jax.lax.axis_index("group") * GROUP, GROUP), GROUP)
    number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    thresholds = plgpu.load(thresholds_ref.at[walks, :], layout=layout, optimized=False)

    def load(i: Array) -> Array:
        return plgpu.load(gram_ref.at[walks, i, :], layout=layout, optimized=False)

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        s, row = carry
        # The next row is loaded while this step waits for its sum.
        following = load(jnp.minimum(i + 1, np.int32(steps - 1)))
        # A sum of one number and zeros is exact in any order.
        sign = jnp.sum(jnp.where(number == i, sign_of(s, thresholds), 0.0), axis=1)
        sign = jax.lax.broadcast_in_dim(sign, shape, (0,))
        # A number is final at its own step, so the last s has the inner products of all steps.
        return jnp.where(number > i, s + sign * row, s), following

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    inner, _ = jax.lax.fori_loop(0, steps, step, (zeros, load(np.int32(0))))
    inner_ref[walks, :], signs_ref[walks, :] = inner, sign_of(inner, thresholds)


def balance(
    keys: Array,
    values: Array,
    thresholds: Array,
    shift: Array,
    gain: Array,
    tau: float,
    interpret: object = None,
) -> tuple[Array, Array]:
    """`reference.balance`: XLA computes the Gram matrices, the kernel walks."""
    return walk(reference.gram(keys, values, shift, gain, tau), thresholds, interpret)
