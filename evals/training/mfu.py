"""Model FLOPs utilisation of a training step: its operations over the device's peak.

On a CPU the peak is that of a large float32 product, measured in alternation with the steps; on an
accelerator it is the data sheet's. Operations are 6 N + 12 L (N H) T per token (PaLM, appendix B),
without a reduction for the causal mask.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from argparse import Namespace
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import Variant, bar, ratio, time_rounds, timed
from jaxkv.evals.lib.verdict import Statement, above, below
from jaxkv.models.network import device
from jaxkv.models.training import training
from jaxkv.models.training.data import FRONT
from jaxkv.models.training.pretrain import setting_for
from jaxkv.models.training.recipes import PRESETS, Recipe

ASKED = {"cpu": ("tiny", 0.50), "gpu": ("160m", 0.45)}  # preset and share
SINKS = ("none", "token", "zero", "logit")
SIDE = 2048  # side of the matrices whose product measures a CPU's peak


FLAGS = (
    flag("--preset", None, "default: by platform", choices=list(PRESETS)),
    flag("--rows", type=int, about="samples a step (default: the preset's)", minimum=1),
    flag("--vocab", 4096, minimum=4),
    flag("--rounds", 15, minimum=1),
    flag("--trace", False, "add the time of a step by GPU kernel, with sink_variant=token"),
)


def measure(run: Run) -> dict[str, Any]:
    """The shares of the peak; with --trace also the times of kernels."""
    options = run.options
    preset, share = ASKED.get(jax.default_backend(), ASKED["gpu"])
    recipe = PRESETS[options.preset or preset]
    if options.rows:
        recipe = dataclasses.replace(recipe, batch_size=options.rows, grad_accum_steps=1)
    results = {"preset": options.preset or preset, "vocab": options.vocab}
    results |= shares_of_peak(recipe, options.vocab, options.rounds, share)
    if options.trace:
        with_token = dataclasses.replace(recipe, sink_variant="token")
        results["kernels"] = traced(with_token, options.vocab)
    return results


def record_name(_: Namespace) -> str:
    platform = jax.default_backend()
    return "mfu" if platform == "cpu" else f"mfu_{platform}"


def shares_of_peak(recipe: Recipe, vocab: int, count: int, share: float) -> dict[str, Any]:
    """The step of every variant and the peak, alternating."""
    on_cpu = jax.default_backend() == "cpu"
    variants: dict[str, Variant] = {}
    for sinks in SINKS:
        variants[sinks] = stepping(dataclasses.replace(recipe, sink_variant=sinks), vocab)
    if on_cpu:
        product = partial(jax.jit(jax.numpy.matmul), *[jax.numpy.ones((SIDE, SIDE))] * 2)
        variants["peak"] = timed(lambda: product().block_until_ready())
    seconds = time_rounds(variants, count, f"{recipe.batch_size} x {recipe.context} tokens a step")
    config = setting_for(recipe, vocab, (), 0).config
    tokens = recipe.batch_size * recipe.context
    flops = training.flops_per_token(config, recipe.context) * tokens
    if on_cpu:
        at_peak = flops / (2 * SIDE**3) * np.array(seconds["peak"])  # seconds a step would take
        shares = {s: ratio(at_peak, seconds[s]) for s in SINKS}
        peak = spread(2 * SIDE**3 / np.array(seconds["peak"]))
    else:
        shares = {s: spread(flops / np.array(seconds[s]) / device.peak()) for s in SINKS}
        peak = spread([device.peak()])
    return {
        "recipe": dataclasses.asdict(recipe),
        "flops_per_token": flops / tokens,
        "peak": peak,
        "tokens_per_second": {s: spread(tokens / np.array(seconds[s])) for s in SINKS},
        "share": shares,
        "bars": [bar(f"training, share of the peak, sinks={s}", shares[s], ">=", share)
                 for s in SINKS],
    }  # fmt: skip


def traced(recipe: Recipe, vocab: int, steps: int = 3) -> dict[str, float]:
    """Milliseconds of a training step by kernel of the accelerator, the longest first."""
    step, total = stepping(recipe, vocab), Counter[str]()
    step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                step()
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
    for plane in planes:
        for line in plane.lines if "/device:" in plane.name else ():
            for event in line.events if "Stream" in line.name else ():
                total[re.sub(r"[.\d]+$", "", event.name)] += event.duration_ns / 1e6 / steps
    for name, milliseconds in total.most_common(20):
        print(f"{milliseconds:8.2f} ms {name:.100}")
    return dict(total.most_common())


def stepping(recipe: Recipe, vocab: int) -> Variant:
    """One training step on random tokens, continuing from the last one."""
    front = tuple(range(1, 1 + len(FRONT.get(recipe.sink_variant, ()))))
    setting = setting_for(recipe, vocab, front, 0)
    held = [training.init(setting)]
    random = np.random.default_rng(0)
    runs = random.integers(3, vocab, (recipe.batch_size, recipe.context + 1)).astype(np.int32)
    parts = setting.split(runs)

    def step() -> None:
        held[0], reported = training.update(setting, held[0], parts)
        jax.block_until_ready(reported)

    return timed(step)


MEASURE = Measure(record_name, measure, FLAGS)
STATEMENTS = (
    Statement("ACCELERATOR.md", "meet the target of 0.45 of the peak without sinks and with a sink "
              "token, and miss it with the zero sink and with sink logits", "mfu_gpu",
              [*(above(f"share/{sinks}", ASKED["gpu"][1], sure=False)
                 for sinks in ("none", "token")),
               *(below(f"share/{sinks}", ASKED["gpu"][1], sure=False)
                 for sinks in ("zero", "logit"))]),
    Statement("ACCELERATOR.md", "three trainings ran at the same time in under ten minutes",
              "sink_tables", [below("variants/{variant}/seconds", 600)]),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
