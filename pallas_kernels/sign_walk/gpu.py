"""The walk on an NVIDIA GPU in Triton, one program per walk. No GPU has run it yet."""

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
# Bytes of shared memory for one operand of a product. GPUs of capability 8.0 or later have at least
# 99 KiB per program, and more than one operand may need a part of it.
SHARED = 64 * 2**10
WARPS = 4


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
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=2),
        interpret=interpret,
    )(gram, thresholds)


def _walk_block(gram_ref, thresholds_ref, signs_ref, inner_ref) -> None:
    thresholds = thresholds_ref[...]
    step = partial(_step, thresholds, lambda i: gram_ref[i, :])
    zeros = jnp.zeros_like(thresholds)
    _, signs_ref[...], inner_ref[...] = jax.lax.fori_loop(
        0, thresholds.shape[0], lambda i, carry: step(i, i, carry), (zeros, zeros, zeros)
    )


def _step(thresholds: Array, row_of, i: Array, at: Array, carry: tuple) -> tuple:
    """One step: row_of(at) is row i of the Gram matrix."""
    s, signs, inners = carry
    here = jnp.arange(s.shape[0]) == i
    # A sum of one number and zeros is exact in any order.
    pick = lambda x: jnp.broadcast_to(jnp.sum(jnp.where(here, x, 0.0)), x.shape)  # noqa: E731
    inner = pick(s)
    sign = sign_of(inner, pick(thresholds))
    return s + sign * row_of(at), jnp.where(here, sign, signs), jnp.where(here, inner, inners)


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
    thresholds, shift, gain = thresholds_ref[...], shift_ref[0], gain_ref[0]
    width = SHARED // (4 * thresholds.shape[0])

    def dot(ref, p: int, q: int, first: Array) -> Array:
        size = ref.shape[2]
        parts = [pl.ds(at, min(width, size)) for at in range(0, size, width)]
        return sum(
            jax.lax.dot_general(
                ref[p, pl.ds(first, PANEL), part], ref[q, :, part], (((1,), (1,)), ((), ())),
                precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
            )
            for part in parts
        )  # fmt: skip

    def part(first: Array, p: int, q: int) -> Array:
        kernel = jnp.exp(dot(keys_ref, p, q, first) - shift)
        return kernel * (dot(values_ref, p, q, first) + np.float32(tau))

    def panel(number: Array, carry: tuple) -> tuple:
        first = number * PANEL
        rows = signed_sum(partial(part, first), keys_ref.shape[0]) * gain
        place = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        row_of = lambda at: jnp.sum(jnp.where(place == at, rows, 0.0), axis=0)  # noqa: E731
        step = partial(_step, thresholds, row_of)
        return jax.lax.fori_loop(0, PANEL, lambda at, carry: step(first + at, at, carry), carry)

    zeros = jnp.zeros_like(thresholds)
    _, signs_ref[...], inner_ref[...] = jax.lax.fori_loop(
        0, thresholds.shape[0] // PANEL, panel, (zeros, zeros, zeros)
    )
