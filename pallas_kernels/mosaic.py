"""Mosaic GPU, the language in which Pallas compiles kernels for NVIDIA GPUs once Triton is removed.

It needs a GPU of compute capability 9.0 (Hopper) or later. A program of a kernel is a warpgroup,
128 threads in four warps. Importing this module takes almost half a second.
"""

from __future__ import annotations

import inspect

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:
    plgpu = None

LANES = 32  # threads of a warp
WARPS = 4  # of a warpgroup
VECTOR = 4  # numbers that a thread loads or stores at once


def is_available() -> bool:
    """Whether this jax has the interface that the kernels use: jax 0.12 has it, 0.7 has not."""
    return plgpu is not None and "out_type" in inspect.signature(plgpu.kernel).parameters


def rows_in_tile(threads: int) -> int:
    """Rows that a warpgroup stores at a time in `row_layout`."""
    return WARPS * LANES // threads


def row_layout(threads: int) -> plgpu.Layout:
    """An array [rows, columns] in the registers of a warpgroup, a row in `threads` of a warp.

    A sum over columns stays within a warp. The shape must be a multiple of
    [rows_in_tile(threads), VECTOR * threads].
    """
    rows, columns = LANES // threads, VECTOR * threads
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS * rows, columns), (rows, columns), (VECTOR,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
