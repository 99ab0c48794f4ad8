"""Model FLOPs utilisation of a training step: its operations over the device's peak.

On a CPU the peak is that of a large float32 product, measured in alternation with the steps; on an
accelerator it is the data sheet's. Operations are 6 N + 12 L (N H) T per token (PaLM, appendix B),
without a reduction for the causal mask.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from functools import partial
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
)


def measure(run: Run) -> dict[str, Any]:
    """The shares of the peak."""
    options = run.options
    preset, share = ASKED.get(jax.default_backend(), ASKED["gpu"])
    recipe = PRESETS[options.preset or preset]
    if options.rows:
        recipe = dataclasses.replace(recipe, batch_size=options.rows, grad_accum_steps=1)
    results = {"preset": options.preset or preset, "vocab": options.vocab}
    return results | shares_of_peak(recipe, options.vocab, options.rounds, share)


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
