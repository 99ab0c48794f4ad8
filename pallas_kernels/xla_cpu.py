"""Workarounds for XLA:CPU in the XLA forms of the kernels.

Each says what was measured, or that nothing was recorded. The compiled form is the same on all
platforms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.pallas_kernels import host_memory

# Sampled slots that `sampled_attention` gathers at a time.
# Measured on a CPU: 192 to 640 are equally fast, 128 is slower. The figures were not recorded.
GATHERED_SLOTS = 256


def gather(array: Array, at: Array) -> Array:
    """array[at] in device memory; every index must be in bounds.

    XLA:CPU gathers half precision as float32, and without a barrier it converts the whole cache
    first. No recorded measurement.
    A gather that handles indices out of bounds takes a tenth longer. Measured on a CPU; the figure
    was not recorded.
    """
    if array.dtype != jnp.float32:
        array, at = jax.lax.optimization_barrier((array, at))
    return host_memory.take(array, at)
