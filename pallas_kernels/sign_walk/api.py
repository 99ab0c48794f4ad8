"""Signs of self-balancing walks (Alweiss, Liu, Sawhney 2021), on any platform.

A walk chooses +1 or -1 per step, with a bias that keeps the signed sum of its vectors short:
P(+1) = 1/2 - s/(2c), where s is the inner product of the vector with the sum so far. Here the
vectors are those of BalanceKV (2502.07861, section 3): an inner product is that of the values times
the exponential of that of the keys, divided by the square root of the head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.pallas_kernels import triton
from jaxkv.pallas_kernels.sign_walk import reference
from jaxkv.pallas_kernels.sign_walk.reference import NO_STEP

WalkKernel = Literal["xla", "pallas_tpu", "pallas_gpu"]


class Walk(NamedTuple):
    """signs [...,b] int8: +1, -1, or 0 where there is no step.

    inner [...,b] float32: at each step, the sum of the Gram matrix times the signs so far; outside
    -1/2 .. 1/2 the sign was certain.
    """

    signs: Array
    inner: Array


def balance_walk(
    keys: Array,
    values: Array,
    thresholds: Array,
    shift: Array,
    gain: Array,
    tau: float,
    implementation: WalkKernel | None = None,
) -> Walk:
    """Walks over tokens or differences of two tokens; a TPU writes no Gram matrix to memory.

    keys [...,P,b,d], scaled by the root of key_scale / sqrt d, values [...,P,b,d']: a step is a
    token (P = 1) or the first of two minus the second (P = 2). The inner product of two tokens is
    gain x exp(<k,k'> - shift) (<v,v'> + tau); shift, gain [...]; a gain has the factor 1/(2c). tau:
    balances the denominator of the softmax beside its numerator. thresholds [...,b]: 1/2 - u for u
    uniform in [0, 1), or NO_STEP. implementation: None chooses for the platform and shape; a name
    raises ValueError where it is unsupported. Kernels may round Gram matrices differently in the
    last bits.
    """
    from jaxkv.pallas_kernels.sign_walk import gpu, tpu  # importing Pallas takes a quarter second

    blocks, steps = thresholds.shape[:-1], thresholds.shape[-1]
    count = len(blocks)
    flat = tuple(a.reshape(-1, *a.shape[count:]) for a in (keys, values, thresholds, shift, gain))
    kernels: dict[str, Callable] = {"xla": partial(reference.balance, tau=tau)}
    width = sum(array.shape[1] * array.shape[-1] for array in flat[:2])
    if tpu.supports(round_up(steps, tpu.LANES), width):
        kernels["pallas_tpu"] = partial(on_tpu, tau=tau)
    if gpu.supports(next_power(steps)):
        kernels["pallas_gpu"] = partial(on_gpu, tau=tau)
    if implementation is None:
        in_triton = kernels.get("pallas_gpu") if triton.is_supported() else None
        signs, inner = jax.lax.platform_dependent(
            *flat,
            tpu=kernels.get("pallas_tpu", kernels["xla"]),
            cuda=in_triton or kernels["xla"],
            default=kernels["xla"],
        )
    elif implementation in kernels:
        signs, inner = kernels[implementation](*flat)
    else:
        raise ValueError(
            f"a walk of {steps} steps is supported by {', '.join(kernels)}, "
            f"got {implementation!r}; leave implementation out to choose by platform"
        )
    return Walk(signs.astype(jnp.int8).reshape(*blocks, steps), inner.reshape(*blocks, steps))


def on_tpu(*flat: Array, tau: float, interpret: object = False) -> tuple[Array, ...]:
    """`tpu.balance` on any supported number and length of walks, padded to its tiles."""
    from jaxkv.pallas_kernels.sign_walk import tpu

    blocks, steps = flat[2].shape
    padded = pad(flat, round_up(blocks, tpu.GROUP), round_up(steps, tpu.LANES))
    return tuple(out[:blocks, :steps] for out in tpu.balance(*padded, tau, interpret))


def on_gpu(*flat: Array, tau: float, interpret: bool = False) -> tuple[Array, ...]:
    """`gpu.balance` on any supported length of walks, padded to a power of two."""
    from jaxkv.pallas_kernels.sign_walk import gpu

    blocks, steps = flat[2].shape
    padded = pad(flat, blocks, next_power(steps))
    return tuple(out[:, :steps] for out in gpu.balance(*padded, tau, interpret))


# The axes of keys, values, thresholds, shift and gain: M walks, P members of a step, b steps.
AXES = "MPbd", "MPbd", "Mb", "M", "M"


def pad(flat: tuple[Array, ...], blocks: int, steps: int) -> tuple[Array, ...]:
    """The arguments padded with empty walks and steps."""
    size = {"M": blocks, "b": steps}
    return tuple(
        jnp.pad(
            array,
            [
                (0, size.get(letter, length) - length)
                for letter, length in zip(axes, array.shape, strict=True)
            ],
            constant_values=NO_STEP if axes == "Mb" else 0,
        )
        for axes, array in zip(AXES, flat, strict=True)
    )


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def next_power(size: int) -> int:
    """The next power of two that the GPU kernel supports."""
    from jaxkv.pallas_kernels.sign_walk import gpu

    return max(gpu.MIN_STEPS, 1 << (size - 1).bit_length())
