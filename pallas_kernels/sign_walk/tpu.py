"""The walk on a TPU: eight walks side by side, one Gram row of each per step.

No TPU has run it yet.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxkv.pallas_kernels.sign_walk.reference import sign_of, signed_sum

GROUP = 8  # walks per program: the sublanes of a vector register
LANES = 128
VMEM = 12 * 2**20  # bytes of a core's 16 MiB that a program may use


def supports(steps: int, width: int) -> bool:
    """Whether the kernel supports walks of this many steps; M must be a multiple of GROUP.

    width: numbers per step of the keys and values on the chip.
    """
    # Inputs are double-buffered: the next ones are fetched during the computation.
    return steps % LANES == 0 and 4 * GROUP * steps * (2 * width + steps) <= VMEM


def _run(rows_ref, thresholds: Array, signs_ref, inner_ref) -> None:
    shape = thresholds.shape
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)

    def take_step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        s, signs, inners = carry
        at_step = lane == i
        # A sum of one number and zeros is exact in any order.
        pick = lambda x: jnp.sum(jnp.where(at_step, x, 0.0), axis=1, keepdims=True)
        inner = pick(s)
        sign = sign_of(inner, pick(thresholds))
        s = s + sign * rows_ref[i]
        return s, jnp.where(at_step, sign, signs), jnp.where(at_step, inner, inners)

    zeros = jnp.where(thresholds > 4, thresholds, 0.0)  # zeros, in the layout of the thresholds
    _, signs, inners = jax.lax.fori_loop(0, shape[1], take_step, (zeros, zeros, zeros))
    signs_ref[...] = signs
    inner_ref[...] = inners


def balance(
    keys: Array,
    values: Array,
    thresholds: Array,
    shift: Array,
    gain: Array,
    tau: float,
    interpret: object = False,
) -> tuple[Array, Array]:
    """`reference.balance`: the Gram matrices are computed on the chip and stay there."""
    blocks, steps = thresholds.shape
    tokens = lambda a: pl.BlockSpec((GROUP, *a.shape[1:]), lambda i: (i, 0, 0, 0))
    block_spec = pl.BlockSpec((GROUP, steps), lambda i: (i, 0))
    lanes = lambda x: jnp.broadcast_to(x[:, None], thresholds.shape)
    return pl.pallas_call(
        partial(_balance_group, tau=tau),
        grid=(blocks // GROUP,),
        in_specs=[tokens(keys), tokens(values), block_spec, block_spec, block_spec],
        out_specs=[block_spec, block_spec],
        out_shape=[jax.ShapeDtypeStruct((blocks, steps), jnp.float32)] * 2,
        scratch_shapes=[pltpu.VMEM((steps, GROUP, steps), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(keys, values, thresholds, lanes(shift), lanes(gain))


def _balance_group(
    keys_ref,
    values_ref,
    thresholds_ref,
    shift_ref,
    gain_ref,
    signs_ref,
    inner_ref,
    rows_ref,
    *,
    tau,
) -> None:
    def dot(x: Array, y: Array) -> Array:
        return jax.lax.dot_general(
            x,
            y,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def part(block: int, p: int, q: int) -> Array:
        kernel = jnp.exp(dot(keys_ref[block, p], keys_ref[block, q]) - shift_ref[block][None])
        return kernel * (dot(values_ref[block, p], values_ref[block, q]) + np.float32(tau))

    for block in range(GROUP):
        gram = signed_sum(partial(part, block), keys_ref.shape[1])
        rows_ref[:, block, :] = gram * gain_ref[block][None]
    _run(rows_ref, thresholds_ref[...], signs_ref, inner_ref)
