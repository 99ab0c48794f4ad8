"""Time kernel, gathered blocks and dense attention on the local device, interleaved.

    python -m jaxkv.pallas_kernels.sampled_attention.bench

A sample is 2 % of the keys of each query head, with given log weights. A CPU has no kernel, and
`--lengths 32768 --kv-heads 1` is quick there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import jax

from jaxkv.pallas_kernels.sampled_attention import shapes
from jaxkv.pallas_kernels.sampled_attention.api import LogitSettings, sampled_attention

KERNEL = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}  # by jax.default_backend()


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
    kernel = KERNEL.get(jax.default_backend())
    names = ["dense", "xla", *([kernel] if kernel else [])]
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, medians of {options.rounds} rounds")
    titles = [f"{name:>12}{'x dense':>9}{'MB read':>9}" for name in names]
    print(f"{'type':10}{'slots':>8}{'batch':>6}" + "".join(titles))
    for dtype in options.dtype:
        for slots in options.lengths:
            for batch in options.batches:
                heads = options.heads * options.kv_heads
                capacity = int(1.5 * shapes.SAMPLED * slots)
                size = shapes.BenchShape(
                    batch, heads, options.kv_heads, slots, options.head_dim, capacity, dtype
                )
                print_row(size, names, options.rounds)


def print_row(shape: shapes.BenchShape, names: list[str], rounds: int) -> None:
    """Print the milliseconds of each variant, their ratio to dense, and the bytes each reads."""
    args = shapes.inputs(shape, "log", fraction=shapes.SAMPLED)
    attend = partial(sampled_attention, settings=LogitSettings(shape.head_dim**-0.5))
    run = {name: jax.jit(partial(attend, implementation=name)) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        jax.block_until_ready(run[name](*args))  # compiles
    for _ in range(rounds):
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(run[name](*args))
            seconds[name].append(time.perf_counter() - start)
    slot = 2 * shape.head_dim * args[1].dtype.itemsize
    tile = 8 if names[-1] == "pallas_tpu" and shape.dtype != "float32" else 1
    read = {name: int(args[4].sum()) * slot for name in names}
    read["dense"] = shape.batch * shape.kv_heads * shape.slots * slot
    read[names[-1]] *= tile
    line = f"{shape.dtype:10}{shape.slots:8}{shape.batch:6}"
    for name in names:
        ratios = [a / b for a, b in zip(seconds["dense"], seconds[name], strict=True)]
        line += f"{1e3 * statistics.median(seconds[name]):9.3f} ms{statistics.median(ratios):9.2f}"
        line += f"{read[name] / 1e6:9.1f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
