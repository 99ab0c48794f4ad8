"""Kernel and scan side by side, in turns, on the device that is here.

    python -m jaxkv.pallas_kernels.sign_walk.bench

The walks are those of a prompt of 32,768 tokens with 8 kv heads. On a CPU there is the scan alone.
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
    ask = argparse.ArgumentParser(prog="python -m jaxkv.pallas_kernels.sign_walk.bench")
    ask.add_argument("--rounds", type=int, default=20, help="timings of each, in turns")
    ask.add_argument("--blocks", type=int, help="walks (default: those of the prompt)")
    given = ask.parse_args()
    kernel = KERNEL.get(jax.default_backend())
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, medians of {given.rounds} rounds")
    print(f"{'':24}{'scan':>12}{'kernel':>12}{'times faster':>14}{'other signs':>13}")
    for name, shape in shapes.PROMPT.items():
        shape = shape._replace(blocks=given.blocks or shape.blocks)
        tokens = shapes.inputs(shape)
        square = jax.jit(reference.gram, static_argnums=4)(*tokens[:2], *tokens[3:], 1.0)
        for what, function, args in (
            ("walk", api.sign_walk, (square, tokens[2])),
            ("fused", partial(api.balance_walk, tau=1.0), tokens),
        ):
            show(f"{name}, {what}", function, args, kernel, given.rounds)


def show(title: str, function, args: tuple, kernel: str | None, rounds: int) -> None:
    """One line: milliseconds of each, how they compare, and the share of signs that differ."""
    kinds = ["xla", *([kernel] if kernel else [])]
    run = {kind: jax.jit(partial(function, implementation=kind)) for kind in kinds}
    signs = {kind: np.asarray(run[kind](*args).signs) for kind in kinds}  # compiles too
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            begun = time.perf_counter()
            jax.block_until_ready(run[kind](*args))
            seconds[kind].append(time.perf_counter() - begun)
    median = {kind: 1e3 * statistics.median(seconds[kind]) for kind in kinds}
    line = f"{title:24}{median['xla']:9.2f} ms"
    if kernel:
        ratios = [a / b for a, b in zip(seconds["xla"], seconds[kernel], strict=True)]
        other = np.mean(signs["xla"] != signs[kernel])
        line += f"{median[kernel]:9.2f} ms{statistics.median(ratios):14.1f}{other:13.2%}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
