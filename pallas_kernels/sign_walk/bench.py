"""Time kernel and scan on the local device, interleaved in one process.

    python -m jaxkv.pallas_kernels.sign_walk.bench

The walks are those of a prompt of 32,768 tokens with 8 KV heads. A CPU has only the scan.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import jax
import numpy as np

from jaxkv.pallas_kernels.sign_walk import api, reference, shapes

KERNEL = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}  # by jax.default_backend()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxkv.pallas_kernels.sign_walk.bench")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved timings of each")
    parser.add_argument("--blocks", type=int, help="number of walks (default: as the prompt has)")
    options = parser.parse_args()
    kernel = KERNEL.get(jax.default_backend())
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, medians of {options.rounds} rounds")
    print(f"{'':24}{'scan':>12}{'kernel':>12}{'times faster':>14}{'other signs':>13}")
    for name, shape in shapes.PROMPT.items():
        shape = shape._replace(blocks=options.blocks or shape.blocks)
        tokens = shapes.inputs(shape)
        square = jax.jit(reference.gram, static_argnums=4)(*tokens[:2], *tokens[3:], 1.0)
        for walk, function, args in (
            ("walk", api.sign_walk, (square, tokens[2])),
            ("fused", partial(api.balance_walk, tau=1.0), tokens),
        ):
            print_row(f"{name}, {walk}", function, args, kernel, options.rounds)


def print_row(title: str, function, args: tuple, kernel: str | None, rounds: int) -> None:
    """Print milliseconds of each variant, their ratio, and the fraction of signs that differ."""
    names = ["xla", *([kernel] if kernel else [])]
    run = {name: jax.jit(partial(function, implementation=name)) for name in names}
    signs = {name: np.asarray(run[name](*args).signs) for name in names}  # also compiles
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(run[name](*args))
            seconds[name].append(time.perf_counter() - start)
    median = {name: 1e3 * statistics.median(seconds[name]) for name in names}
    line = f"{title:24}{median['xla']:9.2f} ms"
    if kernel:
        ratios = [a / b for a, b in zip(seconds["xla"], seconds[kernel], strict=True)]
        other = np.mean(signs["xla"] != signs[kernel])
        line += f"{median[kernel]:9.2f} ms{statistics.median(ratios):14.1f}{other:13.2%}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
