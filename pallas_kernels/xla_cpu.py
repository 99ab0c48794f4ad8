"""Workarounds for XLA:CPU in the XLA forms of the kernels.

Each says what XLA does without it, and where that was measured: in a row of the record
`workarounds`, which evals/benchmarks/cpu_forms.py makes. The compiled form is the same on all
platforms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.pallas_kernels import host_memory

# Sampled slots that `sampled_attention` gathers at a time. All at once, a head with few sampled
# slots would take as long as a full one; in smaller blocks the loop costs more.
# Record workarounds, rows gathered_slots and gathered_slots-128.
GATHERED_SLOTS = 256


def gather(array: Array, at: Array) -> Array:
    """array[at] in device memory; every index must be in bounds.

    XLA:CPU gathers half precision as float32, and without a barrier jax 0.7.2 converts the whole
    cache first. Measured there, without a record: the program of row gather takes more than ten
    times as long, and 50 MB instead of 0.2 MB. With jax 0.12 the barrier changes nothing.
    Record workarounds, row gather.
    """
    if array.dtype != jnp.float32:
        array, at = jax.lax.optimization_barrier((array, at))
    return host_memory.take(array, at)
