"""Times of kernel and scan on the local device, interleaved in one process.

The walks are those of a prompt of 32,768 tokens with 8 KV heads. A CPU has only the scan.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np

from jaxkv.pallas_kernels.sign_walk import api, shapes
from jaxkv.pallas_kernels.timing import KERNEL, time_interleaved


def measure(rounds: int, blocks: int | None = None) -> Iterator[tuple[str, dict]]:
    """Yield a title and what `time_walks` returns, for each kind of walk.

    blocks: the number of walks; None: as a prompt of 32,768 tokens has.
    """
    for name, shape in shapes.PROMPT.items():
        tokens = shapes.inputs(shape._replace(blocks=blocks or shape.blocks))
        yield f"{name}, products and walk", time_walks(tokens, rounds)


def time_walks(args: tuple, rounds: int) -> dict:
    """Milliseconds of the scan and the kernel, their ratio by round, and the share of other signs.

    A CPU has the scan only.
    """
    kernel = KERNEL.get(jax.default_backend())
    names = {"xla": "xla"} | ({"kernel": kernel} if kernel else {})
    run = {
        name: jax.jit(partial(api.balance_walk, tau=1.0, implementation=implementation))
        for name, implementation in names.items()
    }
    timings: dict = time_interleaved(run, args, rounds)
    if kernel:
        signs = {name: np.asarray(run[name](*args).signs) for name in names}
        timings["times faster"] = [
            a / b for a, b in zip(timings["xla"], timings["kernel"], strict=True)
        ]
        timings["other signs"] = float(np.mean(signs["xla"] != signs["kernel"]))
    return timings
