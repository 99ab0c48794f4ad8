"""A Triton kernel that merges attention to parts of the keys, which programs have computed.

No GPU has run it yet; it is compiled for an H100.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jaxkv.pallas_kernels.online_softmax import merge

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # deprecated since jax 0.12
    plgpu = None


def merge_parts(
    out: Array, lse: Array, tokens: int, dtype: jnp.dtype, interpret: bool
) -> tuple[Array, Array]:
    """The parts of out [P,B,T,N,H] and lse [P,B,T,N] as one, of the first tokens.

    P is a power of two. dtype: of the merged output. XLA takes five kernels for it.
    """
    parts, batch, _, heads, head_dim = out.shape
    # At most 64 floats per thread, so that registers are not spilled.
    warps = max(1, min(8, pl.next_power_of_2(parts * head_dim) // (64 * 32)))
    rows = lambda *shape: (parts, None, None, None, *shape)
    return pl.pallas_call(
        _merge_row,
        grid=(tokens, heads, batch),
        in_specs=[
            pl.BlockSpec(rows(head_dim), lambda t, n, b: (0, b, t, n, 0)),
            pl.BlockSpec(rows(), lambda t, n, b: (0, b, t, n)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, head_dim), lambda t, n, b: (b, t, n, 0)),
            pl.BlockSpec((None, None, 1), lambda t, n, b: (b, t, n)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, tokens, heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=warps),
        interpret=interpret,
    )(out, lse)


def _merge_row(part_ref, part_lse_ref, out_ref, lse_ref) -> None:
    out, lse = merge(part_ref[...], part_lse_ref[...][:, None], axis=0)
    out_ref[...] = out.astype(out_ref.dtype)
    lse_ref[...] = lse
