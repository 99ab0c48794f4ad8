"""Times of several implementations of one function, interleaved in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import jax

KERNEL = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}  # by jax.default_backend(); a CPU has none


def time_interleaved(
    run: Mapping[str, Callable], args: tuple, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each compiled function in each round, after a call that compiles it."""
    for function in run.values():
        jax.block_until_ready(function(*args))
    timings: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(rounds):
        for name, function in run.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            timings[name].append(1e3 * (time.perf_counter() - start))
    return timings
