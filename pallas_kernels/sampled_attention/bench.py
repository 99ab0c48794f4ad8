"""Times of kernel, gathered blocks and dense attention on the local device, interleaved.

A sample is 2 % of the keys of each query head, with given log weights. A CPU has no kernel.
"""

from __future__ import annotations

from functools import partial

import jax

from jaxkv.pallas_kernels.sampled_attention import shapes
from jaxkv.pallas_kernels.sampled_attention.api import LogitSettings, sampled_attention
from jaxkv.pallas_kernels.timing import KERNEL, time_interleaved


def implementations() -> list[str]:
    """Those of this platform; a CPU has no kernel."""
    kernel = KERNEL.get(jax.default_backend())
    return ["dense", "xla", *([kernel] if kernel else [])]


def shape_of(
    slots: int, dtype: str, batch: int = 1, heads: int = 32, kv_heads: int = 8, head_dim: int = 128
) -> shapes.AttentionBenchShape:
    """A cache whose samples may hold half as many slots again as they do on average."""
    capacity = int(1.5 * shapes.SAMPLED * slots)
    return shapes.AttentionBenchShape(batch, heads, kv_heads, slots, head_dim, capacity, dtype)


def time_attention(shape: shapes.AttentionBenchShape, rounds: int) -> dict[str, dict]:
    """By implementation: milliseconds, how many times faster than dense, and the bytes it reads."""
    names = implementations()
    args = shapes.inputs(shape, "log", fraction=shapes.SAMPLED)
    attend = partial(sampled_attention, settings=LogitSettings(shape.head_dim**-0.5))
    run = {name: jax.jit(partial(attend, implementation=name)) for name in names}
    times = time_interleaved(run, args, rounds)
    slot = 2 * shape.head_dim * args[1].dtype.itemsize
    tile = 8 if names[-1] == "pallas_tpu" and shape.dtype != "float32" else 1
    read = {name: int(args[4].sum()) * slot for name in names}
    read["dense"] = shape.batch * shape.kv_heads * shape.slots * slot
    read[names[-1]] *= tile
    return {
        name: {
            "milliseconds": times[name],
            "times dense": [a / b for a, b in zip(times["dense"], times[name], strict=True)],
            "bytes read": read[name],
        }
        for name in names
    }
