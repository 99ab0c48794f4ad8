"""The walk on an NVIDIA GPU in Triton, one program per walk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from jaxkv.pallas_kernels.sign_walk import reference
from jaxkv.pallas_kernels.sign_walk.reference import sign_of

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # deprecated since jax 0.12
    plgpu = None

MIN_STEPS = 16
MAX_STEPS = 1024  # limited by the registers of a program
WARPS = 1  # a sum within one warp needs no barrier


def supports(steps: int) -> bool:
    """Whether the kernels support walks of this many steps, and this jax has Triton."""
    return plgpu is not None and MIN_STEPS <= steps <= MAX_STEPS and steps & (steps - 1) == 0


def walk(gram: Array, thresholds: Array, interpret: bool = False) -> tuple[Array, Array]:
    """`reference.walk`."""
    blocks, steps = thresholds.shape
    block_spec = pl.BlockSpec((None, steps), lambda i: (i, 0))
    return pl.pallas_call(
        _walk_block,
        grid=(blocks,),
        in_specs=[pl.BlockSpec((None, steps, steps), lambda i: (i, 0, 0)), block_spec],
        out_specs=[block_spec, block_spec],
        out_shape=[jax.ShapeDtypeStruct((blocks, steps), jnp.float32)] * 2,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
    )(gram, thresholds)


def _walk_block(gram_ref, thresholds_ref, signs_ref, inner_ref) -> None:
    steps = thresholds_ref.shape[0]

    def step(i: Array, carry: tuple) -> tuple:
        s, row = carry
        # The next row is loaded while this step waits for its sum.
        following = gram_ref[jnp.minimum(i + 1, np.int32(steps - 1)), :]
        # A sum of one number and zeros is exact in any order.
        inner = jnp.sum(jnp.where(jnp.arange(steps) == i, s, 0.0))
        sign = sign_of(inner, thresholds_ref[i])
        signs_ref[i], inner_ref[i] = sign, inner
        return s + sign * row, following

    zeros = jnp.zeros((steps,), jnp.float32)
    jax.lax.fori_loop(0, steps, step, (zeros, gram_ref[0, :]))


def balance(
    keys: Array,
    values: Array,
    thresholds: Array,
    shift: Array,
    gain: Array,
    tau: float,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """`reference.balance`: XLA computes the Gram matrices, the kernel walks.

    A kernel that also computed the Gram matrices was compared with the scan of XLA on an H100
    (evals/results/kernels_gpu.json, `fused`): 1.4 times as fast over tokens, 0.6 times over pairs.
    This form has not been timed there.
    """
    return walk(reference.gram(keys, values, shift, gain, tau), thresholds, interpret)
