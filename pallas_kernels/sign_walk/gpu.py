"""The walk on an NVIDIA GPU in Triton, one program per walk."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxkv.pallas_kernels.sign_walk.reference import sign_of, signed_sum

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # deprecated since jax 0.12
    plgpu = None

Array = jax.Array
PANEL = 16  # Gram rows computed at a time: the minimum of a tensor core
MAX_STEPS = 1024  # limited by the registers of a program
SHARED = 32 * 2**10  # bytes of shared memory for one operand of a product, in the fused kernel
WARPS = 2
WARPS_OF_WALK = 1  # a sum within one warp needs no barrier


def supports(steps: int) -> bool:
    """Whether the kernels support walks of this many steps, and this jax has Triton."""
    return plgpu is not None and PANEL <= steps <= MAX_STEPS and steps & (steps - 1) == 0


def walk(gram: Array, thresholds: Array, interpret: bool = False) -> tuple[Array, Array]:
    """`reference.walk`."""
    blocks, steps = thresholds.shape
    one = pl.BlockSpec((None, steps), lambda i: (i, 0))
    return pl.pallas_call(
        _walk_block,
        grid=(blocks,),
        in_specs=[pl.BlockSpec((None, steps, steps), lambda i: (i, 0, 0)), one],
        out_specs=[one, one],
        out_shape=[jax.ShapeDtypeStruct((blocks, steps), jnp.float32)] * 2,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS_OF_WALK, num_stages=2),
        interpret=interpret,
    )(gram, thresholds)


def _walk_block(gram_ref, thresholds_ref, signs_ref, inner_ref) -> None:
    steps = thresholds_ref.shape[0]

    def step(i: Array, carry: tuple) -> tuple:
        s, row = carry
        # The next row is loaded while this step waits for its sum.
        following = gram_ref[jnp.minimum(i + 1, np.int32(steps - 1)), :]
        return _step(i, s, row, thresholds_ref, signs_ref, inner_ref), following

    zeros = jnp.zeros((steps,), jnp.float32)
    jax.lax.fori_loop(0, steps, step, (zeros, gram_ref[0, :]))


def _step(i: Array, s: Array, row: Array, thresholds_ref, signs_ref, inner_ref) -> Array:
    """Step i, with row i of the Gram matrix: write sign and inner product, return the new sums."""
    # A sum of one number and zeros is exact in any order.
    inner = jnp.sum(jnp.where(jnp.arange(s.shape[0]) == i, s, 0.0))
    sign = sign_of(inner, thresholds_ref[i])
    signs_ref[i], inner_ref[i] = sign, inner
    return s + sign * row


def balance(
    keys: Array, values: Array, thresholds: Array, shift: Array, gain: Array, tau: float,
    interpret: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """`reference.balance`: PANEL rows of a Gram matrix are computed at a time, in registers."""
    blocks, steps = thresholds.shape
    tokens = lambda a: pl.BlockSpec((None, *a.shape[1:]), lambda i: (i, 0, 0, 0))  # noqa: E731
    one = pl.BlockSpec((None, steps), lambda i: (i, 0))
    number = pl.BlockSpec((None, 1), lambda i: (i, 0))
    return pl.pallas_call(
        partial(_balance_block, tau=tau),
        grid=(blocks,),
        in_specs=[tokens(keys), tokens(values), one, number, number],
        out_specs=[one, one],
        out_shape=[jax.ShapeDtypeStruct((blocks, steps), jnp.float32)] * 2,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
    )(keys, values, thresholds, shift[:, None], gain[:, None])


def _balance_block(
    keys_ref, values_ref, thresholds_ref, shift_ref, gain_ref, signs_ref, inner_ref, *, tau
) -> None:
    steps, shift, gain = thresholds_ref.shape[0], shift_ref[0], gain_ref[0]

    def dot(ref, p: int, q: int, first: Array) -> Array:
        """Rows first .. first + PANEL of the products of members p and q.

        The head dims are a loop of at least two rounds. Without it Triton would keep all operands
        of a block in shared memory: 256 KiB for 256 tokens of 128 dims, and an H100 has 227 KiB.
        """
        width = max(PANEL, min(ref.shape[2] // 2, SHARED // (4 * steps)))

        def add(part: Array, products: Array) -> Array:
            some = pl.ds(part * width, width)
            return products + jax.lax.dot_general(
                ref[p, pl.ds(first, PANEL), some], ref[q, :, some], (((1,), (1,)), ((), ())),
                precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
            )  # fmt: skip

        start = jnp.zeros((PANEL, steps), jnp.float32)
        return jax.lax.fori_loop(0, ref.shape[2] // width, add, start)

    def part(first: Array, p: int, q: int) -> Array:
        kernel = jnp.exp(dot(keys_ref, p, q, first) - shift)
        return kernel * (dot(values_ref, p, q, first) + np.float32(tau))

    def panel(number: Array, s: Array) -> Array:
        first = number * PANEL
        rows = signed_sum(partial(part, first), keys_ref.shape[0]) * gain
        place = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)

        def step(at: Array, s: Array) -> Array:
            row = jnp.sum(jnp.where(place == at, rows, 0.0), axis=0)
            return _step(first + at, s, row, thresholds_ref, signs_ref, inner_ref)

        return jax.lax.fori_loop(0, PANEL, step, s)

    zeros = jnp.zeros((steps,), jnp.float32)
    jax.lax.fori_loop(0, steps // PANEL, panel, zeros)
