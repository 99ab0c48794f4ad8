"""Workarounds for XLA:CPU. Each says what XLA does without it, and where that was measured.

Every function here computes what its plain form computes. Other platforms compile the plain form,
except where the docstring says that the form is the same everywhere. Rows are those of the record
`workarounds`, made by evals/benchmarks/cpu_forms.py; docs/decisions/compilation.md has its table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.typing import Array, Float

_BLOCK = 2**20  # integers of a matrix that are widened at a time for one token
_PARTS = 8  # of the product of one token with a weight of at least _LARGE elements
_LARGE = 2**18


def decode_compiler_options() -> dict[str, object]:
    """Compiler options of the decode loop: a sequential scheduler on a CPU.

    By default XLA:CPU runs independent operations at the same time, so their temporary arrays are
    in memory together, such as the rotated keys and the values of a sample. The gain is memory; the
    time of SmolLM2-135M does not change.
    Record workarounds, row decode_compiler_options.
    """
    if jax.default_backend() != "cpu":
        return {}
    if jax.__version_info__ >= (0, 10):
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return {"xla_cpu_enable_concurrency_optimized_scheduler": False}


def matmul(
    weight: Float[Array, "O I"],
    x: Float[Array, "I B T"],
    dtype: jnp.dtype | None,
    plain: Callable[[Array, Array], Array],
) -> Float[Array, "O B T"]:
    """`plain(weight, x)`; on a CPU, one token's float32 product with a large weight in eight parts.

    Decoding is limited by memory bandwidth, and XLA:CPU splits such a product so that some cores
    read less of the weight than others.
    Record workarounds, row matmul.
    """
    is_one_token = x.shape[1:] == (1, 1) and x.dtype == jnp.float32
    if not is_one_token or weight.size < _LARGE or weight.shape[0] % _PARTS:
        return plain(weight, x)
    in_parts = partial(_matmul_in_parts, dtype=dtype)
    return jax.lax.platform_dependent(weight, x, cpu=in_parts, default=plain)


def _matmul_in_parts(
    weight: Float[Array, "O I"], x: Float[Array, "I 1 1"], dtype: jnp.dtype | None
) -> Float[Array, "O 1 1"]:
    inputs = jnp.broadcast_to(x[:, 0, 0], (_PARTS, weight.shape[1]))
    y = jax.lax.dot_general(
        weight.reshape(_PARTS, -1, weight.shape[1]),
        inputs,
        (((2,), (1,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y.reshape(-1, 1, 1).astype(dtype or weight.dtype)


def widen(values: Array, x: Float[Array, "I B T"]) -> Array:
    """`values.astype(x.dtype)` for a product with x; on a CPU, inside the loop over tokens.

    XLA:CPU otherwise moves the conversion out of the loop. Each step then reads all weights in
    float32, and memory holds a float copy of the model. A test checks the memory of the compiled
    loop.
    Record workarounds, row widen.
    """
    return in_loop(values, x).astype(x.dtype)


def in_loop(integers: Array, x: Float[Array, "I B T"]) -> Array:
    """The integers; on a CPU they depend on x for one token, so a step reads integers (`widen`)."""
    if x.shape[-1] != 1:
        return integers

    def each_step(integers: Array, x: Array) -> Array:
        first = x.reshape(-1)[0]
        return integers ^ (first != first).astype(integers.dtype)

    plain = lambda integers, x: integers  # noqa: E731
    return jax.lax.platform_dependent(integers, x, cpu=each_step, default=plain)


def matmul_widened(
    rows: Any, x: Float[Array, "I B T"], plain: Callable[[Any, Array], Array], size: int
) -> Array:
    """`plain(rows, x)` of a quantised matrix; on a CPU large ones by blocks, in float32.

    XLA:CPU writes the float copy of a whole matrix before the product reads it. That of a block
    stays in the processor's cache, that of a whole output head does not. rows: arrays that begin
    with an axis of rows, and so does the result. size: integers that are widened.
    Record workarounds, row matmul_widened.
    """
    count, blocks = jax.tree.leaves(rows)[0].shape[0], max(1, size // _BLOCK)
    while count % blocks:
        blocks -= 1
    if x.shape[-1] != 1 or blocks == 1:
        return plain(rows, x)

    def by_block(rows: Any, x: Array) -> Array:
        split = jax.tree.map(lambda a: a.reshape(blocks, -1, *a.shape[1:]), rows)
        products = jax.lax.map(lambda block: plain(block, x.astype(jnp.float32)), split)
        return products.reshape(-1, *products.shape[2:])

    return jax.lax.platform_dependent(rows, x, cpu=by_block, default=plain)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot(a: Array, b: Array, contract: tuple[int, int], dtype: jnp.dtype | None = None) -> Array:
    """The product over one axis of each, the first or the last.

    Backends accumulate products in half precision in float32 and round the result once.

    The gradient rule is the same on all platforms: gradients have the axis order of their arrays,
    so nothing is transposed. JAX's own rule transposes activations, which XLA:CPU does slowly.
    Record workarounds, row dot.
    """
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        # A GPU would write a float32 result to memory before it converts it.
        preferred_element_type=dtype or a.dtype,
    )


def _dot_forward(
    a: Array, b: Array, contract: tuple[int, int], dtype: jnp.dtype | None
) -> tuple[Array, tuple[Array, Array]]:
    return dot(a, b, contract, dtype), (a, b)


def _dot_backward(
    contract: tuple[int, int], _: jnp.dtype | None, arrays: tuple[Array, Array], ct: Array
) -> tuple[Array, Array]:
    # As matrices: the contracted axis, and all others as one.
    a, b = (
        x.reshape(x.shape[0], -1) if axis == 0 else x.reshape(-1, x.shape[-1])
        for x, axis in zip(arrays, contract, strict=True)
    )
    ct = ct.astype(a.dtype).reshape(a.size // arrays[0].shape[contract[0]], -1)

    def gradient(operand: int, partner: Array, partner_free: int) -> Array:
        first, second = (partner, partner_free), (ct, 1 - operand)
        if contract[operand] != 0:
            first, second = second, first
        product = dot(first[0], second[0], (first[1], second[1]))
        return product.reshape(arrays[operand].shape)

    return gradient(0, b, int(contract[1] == 0)), gradient(1, a, int(contract[0] == 0))


dot.defvjp(_dot_forward, _dot_backward)


def has_head_last_product(x: Array, tokens: int) -> bool:
    """Whether projections of `x` are computed as [B,T,N,H], which attention wants untransposed.

    The answer is the same on all platforms: true for several tokens in float32. Otherwise XLA:CPU
    transposes the result of each projection. In half precision jax 0.7 has no such product on a
    CPU.
    Record workarounds, rows has_head_last_product and has_head_last_product-training.
    """
    return tokens > 1 and x.dtype == jnp.float32


def keep_transpose_apart(product: Array) -> Array:
    """Keep XLA from folding a following transpose into this product; the same on all platforms.

    XLA:CPU fails on the folded product in bfloat16. A failure, so there is no measurement.
    """
    return jax.lax.optimization_barrier(product)


# Logits of the training loss in memory at a time: as many as a CPU's cache holds, and more
# elsewhere. Record workarounds, row logits_at_once.
LOGITS_AT_ONCE = {"cpu": 2**21}
LOGITS_AT_ONCE_ELSEWHERE = 2**27


def logits_at_once() -> int:
    """How many logits of the training loss are computed at a time on this backend."""
    return LOGITS_AT_ONCE.get(jax.default_backend(), LOGITS_AT_ONCE_ELSEWHERE)


def query_block() -> int:
    """Queries per block of training attention; small blocks skip more of the causal mask.

    On a CPU the logits of a small block also stay in the processor's cache.
    Record workarounds, row query_block.
    """
    return 128 if jax.default_backend() == "cpu" else 512


def query_block_edges(tokens: int) -> list[int]:
    """The edges of query blocks of equal size, up to one token; the same on all platforms.

    With blocks of 128 and a rest of one query, jax 0.7.2 drops the last block on a CPU and writes
    to wrong addresses. A wrong result, so there is no measurement.
    """
    count = -(-tokens // query_block())
    return [tokens * i // count for i in range(count + 1)]


def map_samples(function: Callable, *arrays: Array) -> tuple[Array, ...]:
    """`function` of every sample: one after another on a CPU, whose cache holds the logits of one.

    Record workarounds, row map_samples.
    """
    if jax.default_backend() == "cpu":
        return jax.lax.map(lambda sample: function(*sample), arrays)
    return jax.vmap(function)(*arrays)
