"""Kernel, blocks of rows and dense side by side, in turns, on the device that is here.

    python -m jaxkv.pallas_kernels.sampled_attention.bench

A sample is 2 % of the keys of each query head, its log weights given. On a CPU there is no kernel,
and --lengths 32768 --kv-heads 1 is soon done.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import jax

from jaxkv.pallas_kernels.sampled_attention import shapes
from jaxkv.pallas_kernels.sampled_attention.api import How, sampled_attention

KERNEL = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}  # by jax.default_backend()


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m jaxkv.pallas_kernels.sampled_attention.bench")
    ask.add_argument("--rounds", type=int, default=20, help="timings of each, in turns")
    ask.add_argument("--lengths", type=int, nargs="+", default=shapes.LENGTHS, help="slots")
    ask.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="rows of a batch")
    ask.add_argument("--heads", type=int, default=4, help="query heads a kv head")
    ask.add_argument("--kv-heads", type=int, default=8)
    ask.add_argument("--head-dim", type=int, default=128)
    ask.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="of the cache")
    given = ask.parse_args()
    kernel = KERNEL.get(jax.default_backend())
    kinds = ["dense", "xla", *([kernel] if kernel else [])]
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, medians of {given.rounds} rounds")
    titles = [f"{kind:>12}{'x dense':>9}{'MB read':>9}" for kind in kinds]
    print(f"{'type':10}{'slots':>8}{'batch':>6}" + "".join(titles))
    for dtype in given.dtype:
        for slots in given.lengths:
            for batch in given.batches:
                heads = given.heads * given.kv_heads
                room = int(1.5 * shapes.SHARE * slots)
                size = shapes.Shape(
                    batch, heads, given.kv_heads, slots, given.head_dim, room, dtype
                )
                show(size, kinds, given.rounds)


def show(shape: shapes.Shape, kinds: list[str], rounds: int) -> None:
    """One line: milliseconds of each, how they compare with dense, and what each reads."""
    args = shapes.inputs(shape, "log", share=shapes.SHARE)
    how = How(shape.head_dim**-0.5)
    run = {k: jax.jit(partial(sampled_attention, how=how, implementation=k)) for k in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds:
        jax.block_until_ready(run[kind](*args))  # compiles
    for _ in range(rounds):
        for kind in kinds:
            begun = time.perf_counter()
            jax.block_until_ready(run[kind](*args))
            seconds[kind].append(time.perf_counter() - begun)
    row = 2 * shape.head_dim * args[1].dtype.itemsize
    tile = 8 if kinds[-1] == "pallas_tpu" and shape.dtype != "float32" else 1
    read = {kind: int(args[4].sum()) * row for kind in kinds}
    read["dense"] = shape.batch * shape.kv_heads * shape.slots * row
    read[kinds[-1]] *= tile
    line = f"{shape.dtype:10}{shape.slots:8}{shape.batch:6}"
    for kind in kinds:
        ratios = [a / b for a, b in zip(seconds["dense"], seconds[kind], strict=True)]
        line += f"{1e3 * statistics.median(seconds[kind]):9.3f} ms{statistics.median(ratios):9.2f}"
        line += f"{read[kind] / 1e6:9.1f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
