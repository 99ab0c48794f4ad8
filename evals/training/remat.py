"""A training step that keeps activations, and one that computes layers again (`remat=layers`).

On this machine: memory, seconds to trace, lower and compile, and the speed of steps that alternate.
For eight TPU v5e chips, ahead of time: the memory of a step of `160m` on one chip, by the number of
parts of a batch of 256 samples. That needs the extra tpu-check; each program compiles for minutes.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh

from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import compile_timed, ratio, time_rounds
from jaxkv.evals.lib.verdict import Results, Statement, within
from jaxkv.evals.training.mfu import stepping
from jaxkv.models.training import training
from jaxkv.models.training.pretrain import setting_for
from jaxkv.models.training.recipes import PRESETS, Recipe

FORMS = ("none", "layers")
CHIPS, VOCAB = "v5e:2x4", 16384
PARTS = (8, 4, 2)  # of a batch of 160m


FLAGS = (
    flag("--preset", "tiny", choices=list(PRESETS)),
    flag("--rounds", 15, minimum=1),
    flag("--parts", PARTS, "none: skip the TPU", nargs="*"),
)


def measure(run: Run) -> dict[str, Any]:
    """Both forms on this machine, and for TPU chips."""
    options = run.options
    jax.config.update("jax_enable_compilation_cache", False)  # of this process alone
    results = both_forms(PRESETS[options.preset], options.rounds) | {"preset": options.preset}
    if options.parts:
        results["v5e"] = {str(parts): on_tpu(parts) for parts in options.parts}
    return results


def both_forms(recipe: Recipe, rounds: int) -> dict[str, Any]:
    """The step of both forms, alternating, and its program."""
    recipes = {form: dataclasses.replace(recipe, remat=form) for form in FORMS}
    programs = {form: compiled(form_recipe) for form, form_recipe in recipes.items()}
    steps = {form: stepping(form_recipe, VOCAB) for form, form_recipe in recipes.items()}
    seconds = time_rounds(steps, rounds, f"{recipe.batch_size} x {recipe.context} tokens a step")
    tokens = recipe.batch_size * recipe.context
    return {
        "recipe": dataclasses.asdict(recipe),
        "programs": programs,
        "tokens_per_second": {form: spread(tokens / np.array(seconds[form])) for form in FORMS},
        "speed_over_none": ratio(seconds["none"], seconds["layers"]),
    }


def compiled(recipe: Recipe) -> dict[str, float]:
    """Bytes of temporaries of a step, and the seconds until it is compiled."""
    setting = setting_for(recipe, VOCAB, (), 0)
    parts = recipe.grad_accum_steps
    shape = (parts, recipe.batch_size // parts, recipe.context + 1)
    runs = jax.ShapeDtypeStruct(shape, np.int32)
    seconds, program = compile_timed(training.update, setting, training.shape(setting), runs, {})
    named = dict(zip(("trace", "lower", "compile"), seconds, strict=True))
    return {"temporaries": program.memory_analysis().temp_size_in_bytes} | named


def on_tpu(parts: int) -> dict[str, dict[str, int]]:
    """By form, the bytes of a step of `160m` on one of eight chips."""
    from jax.experimental import topologies

    for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("TPU_WORKER_HOSTNAMES", "localhost")):
        os.environ.setdefault(name, value)  # there is no TPU to search for
    chips = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS).devices
    mesh, plans = Mesh(np.array(chips), ("data",)), {}
    for form in FORMS:
        recipe = dataclasses.replace(
            PRESETS["160m"], grad_accum_steps=parts, remat=form, dtype="bfloat16"
        )
        # Some forms of the step depend on the platform of the run.
        with mock.patch.object(jax, "default_backend", lambda: "tpu"):
            plan = training.plan_memory(setting_for(recipe, VOCAB, (), 0, mesh))
        plans[form] = plan._asdict()
        title = f"160m on {CHIPS}, {parts} parts, remat={form}"
        print(f"{title}: {plan.total / 1e9:.2f} GB", flush=True)
    return plans


def memory_ratio(results: Results) -> dict[str, float]:
    """Bytes of temporaries of a step with `remat=layers` over those without."""
    programs = results["programs"]
    return {"layers": programs["layers"]["temporaries"] / programs["none"]["temporaries"]}


MEASURE = Measure("remat", measure, FLAGS)
STATEMENTS = (
    Statement("docs/training.md", "A step of `tiny` on a CPU then has about a third of the "
              "temporaries, at about the same speed", "remat",
              [within(memory_ratio, 1 / 3, by=0.05), within("speed_over_none", 1, by=0.1)]),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
