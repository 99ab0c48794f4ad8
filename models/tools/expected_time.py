"""How long `jaxkv advise` will take, from sizes and a probe of the machine, before compiling.

The number of programs and of tokens is known beforehand. How long one takes was measured on one
machine (constants below); the probe says how fast this one is now, beside its other work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import device
from jaxkv.models.network.quantised import Quantised
from jaxkv.models.tools import measurement
from jaxkv.models.tools.advise import FULL
from jaxkv.models.tools.measurement import Stretches

# Seconds of one core of an Intel Xeon at 2.1 GHz with AVX-512, jax 0.10 to 0.12: a program of one
# layer, of a whole decode step besides its layers, and of each of these.
LAYER, DECODE, DECODE_LAYER = 2.2, 1.6, 0.5
LOOP, LOOP_SECONDS = 400_000, 0.0072  # a loop of Python, and its seconds there
SHARE = 0.4  # of the speed of one large product that a model reaches with its small ones
MOST_CORES = 4  # that compiling uses well
SIZE = 1024  # of the product


def seconds(llm: Llm, text: Stretches, policies: Sequence[str]) -> float:
    """The expected seconds of `advise.measure` where nothing is compiled yet."""
    groups = measurement.grouped(llm, text, [FULL, *policies], FULL)
    leaves = jax.tree.leaves(llm.weights, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    parameters = sum(int(np.prod(leaf.shape)) for leaf in leaves)
    work = 2 * parameters * measurement.tokens_fed(text, groups)
    # A policy that evicts has a program for each padded length; one that acts on a prompt has one
    # that reads it, one that compresses it and one for the rest. Layers of one setting share them.
    kinds = {name: len(set(llm.policies(name))) for name in (FULL, *policies)}
    programs = sum(3 * kind for kind in kinds.values())
    decoding = len(kinds) * (DECODE + DECODE_LAYER * llm.config.layers)
    compiling = (LAYER * programs + decoding) * slowness() / min(MOST_CORES, device.cores() or 1)
    return compiling + work / (SHARE * flops())


def slowness() -> float:
    """How many times as long as there a loop of Python takes here: compiling is such work."""
    return _mean_seconds(lambda: sum(range(LOOP))) / LOOP_SECONDS


def flops() -> float:
    """FLOP/s of a large product: on a CPU measured, else from the data sheet."""
    if jax.default_backend() != "cpu":
        return device.peak()
    a = np.ones((SIZE, SIZE), np.float32)
    return 2 * SIZE**3 / _mean_seconds(lambda: a @ a)


def _mean_seconds(work: Callable[[], object], repeats: int = 10) -> float:
    """The mean, which other work of the machine raises as it will raise the whole time."""
    work()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats
