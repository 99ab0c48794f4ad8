"""Time kernel, gathered blocks and dense attention on the local device, interleaved.

    python -m jaxkv.pallas_kernels.sampled_attention.bench

A sample is 2 % of the keys of each query head, with given log weights. A CPU has no kernel, and
`--lengths 32768 --kv-heads 1` is quick there.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import jax

from jaxkv.pallas_kernels.sampled_attention import shapes
from jaxkv.pallas_kernels.sampled_attention.api import LogitSettings, sampled_attention
from jaxkv.pallas_kernels.timing import KERNEL, time_interleaved


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxkv.pallas_kernels.sampled_attention.bench")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved timings of each")
    parser.add_argument("--lengths", type=int, nargs="+", default=shapes.LENGTHS, help="slots")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="batch sizes")
    parser.add_argument("--heads", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="of the cache")
    options = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, medians of {options.rounds} rounds")
    titles = [f"{name:>12}{'x dense':>9}{'MB read':>9}" for name in implementations()]
    print(f"{'type':10}{'slots':>8}{'batch':>6}" + "".join(titles))
    for dtype in options.dtype:
        for slots in options.lengths:
            for batch in options.batches:
                heads = options.heads * options.kv_heads
                shape = shape_of(slots, dtype, batch, heads, options.kv_heads, options.head_dim)
                timings = time_attention(shape, options.rounds)
                line = f"{dtype:10}{slots:8}{batch:6}"
                for row in timings.values():
                    line += f"{statistics.median(row['milliseconds']):9.3f} ms"
                    line += f"{statistics.median(row['times dense']):9.2f}"
                    line += f"{row['bytes read'] / 1e6:9.1f}"
                print(line, flush=True)


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


if __name__ == "__main__":
    main()
