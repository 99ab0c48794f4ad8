"""Signs of self-balancing walks (Alweiss, Liu, Sawhney 2021), on what the arrays lie on.

A walk decides step by step between +1 and -1, and leans to what keeps the signed sum of its vectors
small: P(+1) = 1/2 - s/(2c), s being the inner product of the vector with the sum so far. Here the
vectors are those of BalanceKV (2502.07861, section 3): their inner products are those of values
times the exponential of those of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.pallas_kernels import triton
from jaxkv.pallas_kernels.sign_walk import gpu, reference, tpu
from jaxkv.pallas_kernels.sign_walk.reference import NO_STEP

Array = jax.Array
Implementation = Literal["xla", "pallas_tpu", "pallas_gpu"]


class Walk(NamedTuple):
    """signs [...,b] int8: +1, -1, or 0 where there is no step. met [...,b] float32: s of each step
    as it was met, which lies beyond -1/2 .. 1/2 where nothing was left to chance."""

    signs: Array
    met: Array


def sign_walk(gram: Array, thresholds: Array, implementation: Implementation | None = None) -> Walk:
    """Walks over Gram matrices that are there.

    gram [...,b,b] float32: inner products times 1/(2c). thresholds [...,b] float32: 1/2 - u for u
    uniform in 0 .. 1, or NO_STEP. Equal bits of both give equal signs everywhere. implementation:
    None takes what the platform has for this shape; a name raises ValueError where it has none.
    """
    blocks, steps = thresholds.shape[:-1], thresholds.shape[-1]
    flat = gram.reshape(-1, steps, steps), thresholds.reshape(-1, steps)
    return _run("walk", flat, blocks, steps, implementation)


def balance_walk(
    keys: Array,
    values: Array,
    thresholds: Array,
    shift: Array,
    gain: Array,
    tau: float,
    implementation: Implementation | None = None,
) -> Walk:
    """Walks over tokens, or over differences of two; kernels never write a Gram matrix to memory.

    keys [...,P,b,d] times the root of the temperature over sqrt d, values [...,P,b,d']: a step is
    a token (P = 1) or the first of two less the second (P = 2). The inner product of two tokens
    is gain x exp(<k,k'> - shift) (<v,v'> + tau); shift, gain [...]. tau: balances the softmax's
    denominator beside its numerator. The rest is `sign_walk`'s; where a kernel forms Gram
    matrices, their last bits are its own.
    """
    blocks, steps = thresholds.shape[:-1], thresholds.shape[-1]
    count = len(blocks)
    flat = tuple(a.reshape(-1, *a.shape[count:]) for a in (keys, values, thresholds, shift, gain))
    return _run("balance", flat, blocks, steps, implementation, tau=tau)


def _run(
    what: str,
    flat: tuple[Array, ...],
    blocks: tuple[int, ...],
    steps: int,
    implementation: Implementation | None,
    **settings: float,
) -> Walk:
    tokens = [array.shape for axes, array in zip(AXES[what], flat, strict=True) if "d" in axes]
    kernels: dict[str, Callable] = {"xla": partial(getattr(reference, what), **settings)}
    members = sum(shape[1] * shape[-1] for shape in tokens)
    if tpu.takes(to_multiple(steps, tpu.LANES), members):
        kernels["pallas_tpu"] = partial(on_tpu, what, settings)
    if gpu.takes(to_power(steps)):
        kernels["pallas_gpu"] = partial(on_gpu, what, settings)
    if implementation is None:
        fused = kernels.get("pallas_gpu") if triton.runs() else None
        signs, met = jax.lax.platform_dependent(
            *flat,
            tpu=kernels.get("pallas_tpu", kernels["xla"]),
            cuda=fused or kernels["xla"],
            default=kernels["xla"],
        )
    elif implementation in kernels:
        signs, met = kernels[implementation](*flat)
    else:
        raise ValueError(
            f"a walk of {steps} steps is done by {', '.join(kernels)}, got {implementation!r}; "
            "leave it out for what the platform has"
        )
    return Walk(signs.astype(jnp.int8).reshape(*blocks, steps), met.reshape(*blocks, steps))


def on_tpu(what: str, settings: dict, *flat: Array, interpret: object = False) -> tuple:
    """The TPU kernel on walks of any number and length that it takes."""
    blocks, steps = flat[THRESHOLDS[what]].shape
    kernel = partial(getattr(tpu, what), **settings, interpret=interpret)
    padded = pad(what, flat, to_multiple(blocks, tpu.GROUP), to_multiple(steps, tpu.LANES))
    return tuple(out[:blocks, :steps] for out in kernel(*padded))


def on_gpu(what: str, settings: dict, *flat: Array, interpret: bool = False) -> tuple:
    """The GPU kernel on walks of any length, and tokens of any head dim, that it takes."""
    blocks, steps = flat[THRESHOLDS[what]].shape
    kernel = partial(getattr(gpu, what), **settings, interpret=interpret)
    padded = pad(what, flat, blocks, to_power(steps), to_power)
    return tuple(out[:, :steps] for out in kernel(*padded))


# Of each argument what its axes are: M blocks, b steps, d the numbers of a token, P members.
AXES = {
    "walk": ("Mbb", "Mb"),
    "balance": ("MPbd", "MPbd", "Mb", "M", "M"),
}
THRESHOLDS = {what: axes.index("Mb") for what, axes in AXES.items()}


def pad(
    what: str,
    flat: tuple[Array, ...],
    blocks: int,
    steps: int,
    wide: Callable[[int], int] = lambda size: size,
) -> tuple[Array, ...]:
    """The arguments with blocks and steps that are not there, and tokens of `wide` numbers."""
    size = {"M": lambda _: blocks, "b": lambda _: steps, "d": wide, "P": lambda members: members}
    return tuple(
        jnp.pad(
            array,
            [
                (0, size[letter](have) - have)
                for letter, have in zip(axes, array.shape, strict=True)
            ],
            constant_values=NO_STEP if axes == "Mb" else 0,
        )
        for axes, array in zip(AXES[what], flat, strict=True)
    )


def to_multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def to_power(size: int) -> int:
    return max(gpu.PANEL, 1 << (size - 1).bit_length())
