"""A rehearsal of a long run on this machine: killed, resumed, exported, loaded and streamed.

The command line trains the architecture of a preset for a few steps of a few samples. The process
is killed between two checkpoints, and the same command resumes it. The steps that the killed
process had logged after its last checkpoint must come out again with the same loss. The exported
model is then loaded: it must have the validation loss that the run logged, and it reads several
contexts of text in a bounded cache. The memory of the process before its first checkpoint, less
that of a process that has compiled the step, is compared with `--plan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.benchmarks.rates_llama_cpp import memory
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import bar
from jaxkv.models.generation.score import gather
from jaxkv.models.loading import compilation
from jaxkv.models.training import data, training
from jaxkv.models.training.data import DataFolder
from jaxkv.models.training.pretrain import setting_of, validation
from jaxkv.models.training.recipes import Recipe, read_recipe
from jaxkv.models.training.training import TrainingMemory

CLOSE = 1e-4  # nats: the loss of the exported model against the logged one
WITHIN = 0.1  # of the plan: what weights and a step add to a process that has compiled the step
LEAST = 2**30  # bytes of a plan; the memory of smaller steps is hidden by that of the program
CONTEXTS = 3  # that the exported model reads in one stream
SINKS = 4  # first tokens in the cache of that stream
PAUSE = 0.02  # seconds between two looks at the memory of the run


FLAGS = (
    flag("--preset", "160m"),
    flag("--data", type=Path, required=True, about="output folder of `jaxkv data`"),
    flag("--set", [], "a field of the recipe, such as batch_size or steps", action="append",
         type=str, dest="settings", metavar="FIELD=VALUE"),
    flag("--kill", 10, "kill the run after this step"),
)  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    """The rehearsal of a run in a temporary folder."""
    options = run.options
    settings = [*options.settings, "log_every=1"]
    recipe, tokens = read_recipe(options.preset, settings), data.read(options.data)
    every = (recipe.save_every, recipe.eval_every)
    if not min(every) < options.kill < recipe.steps or not all(options.kill % n for n in every):
        raise UserError(
            "--kill must be between the first and the last checkpoint, and not at one (every "
            f"{every[0]} and {every[1]} of {recipe.steps} steps), got {options.kill}; give "
            "another, or --set save_every"
        )
    data.batch(tokens, "valid", 0, 0, 1, CONTEXTS * recipe.context)  # what is read at the end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run ends with this process
    run.record.about["seeds"] = [recipe.seed]
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--preset={options.preset}", f"--data={options.data}", f"--out={folder}/run"]
        words += [word for setting in settings for word in ("--set", setting)]
        return rehearse(recipe, tokens, words, Path(folder) / "run", options.kill)


def rehearse(
    recipe: Recipe, tokens: DataFolder, words: list[str], out: Path, kill: int
) -> dict[str, Any]:
    """The run in two processes, and what the exported model does."""
    command = [sys.executable, "-m", "jaxkv", "pretrain", *words]
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        plan, program = process.submit(compile_step, recipe, tokens.folder).result()
    killed = watch(command, out, 0, saved_every(recipe), kill)
    before, last = read_log(out), newest(out)
    if last == before[-1]["step"]:
        raise SystemExit(f"the kill met the checkpoint of step {last}; give another --kill")
    resumed = watch(command, out, last, saved_every(recipe))
    after = read_log(out)
    if [line["step"] for line in after] != list(range(1, recipe.steps + 1)):
        raise SystemExit(f"the log must have each of {recipe.steps} steps once, got {len(after)}")
    again = [
        line["loss"] == line_again["loss"] for line, line_again in zip(before, after, strict=False)
    ]
    again = again[last:]  # the resumed process computed these
    added = killed["step"] - program
    read = read_exported(recipe, tokens, out / "hf")
    differs = abs(read["valid_loss"] - after[-1]["valid_loss"])
    return {
        "recipe": dataclasses.asdict(recipe),
        "weights": plan.trained // 4,
        "killed": {"after": before[-1]["step"], "checkpoint": last, "steps_again": len(again)},
        "memory": {"plan": plan._asdict(), "program": program, "processes": [killed, resumed]},
        "log": [{name: line[name] for name in ("step", "loss", "grad_norm", "tokens_per_second")}
                for line in after],
        "tokens_per_second": float(np.median([line["tokens_per_second"] for line in after])),
        "valid_loss": after[-1]["valid_loss"],
        "exported": read,
        "bars": [
            bar("rehearsal, steps with another loss after the kill", again.count(False), "<=", 0),
            bar("rehearsal, exported model, nats from the logged loss", differs, "<=", CLOSE),
            *([bar("rehearsal, memory of a step from its plan, as a share of it",
                   abs(added / plan.total - 1), "<=", WITHIN)] if plan.total > LEAST else []),
        ],
    }  # fmt: skip


def saved_every(recipe: Recipe) -> int:
    """Steps between checkpoints; evaluations save one too."""
    return min(recipe.save_every, recipe.eval_every)


def newest(out: Path) -> int:
    """The step of the newest complete checkpoint; 0 for none."""
    # One that is being written has another name.
    return max(
        (int(folder.name) for folder in (out / "last").glob("*") if folder.name.isdigit()),
        default=0,
    )


def watch(
    command: list[str], out: Path, start: int, saves: int, kill: int | None = None
) -> dict[str, int]:
    """Run a training command to its end, or kill it once it has logged step `kill`.

    start: the step that it starts from. saves: steps between checkpoints. The kill waits for a
    complete checkpoint.
    Returns resident bytes: step, the most while steps ran before the first checkpoint; peak, the
    most in all. Raises SystemExit where the command fails.
    """
    resident, environment = {"step": 0, "peak": 0}, os.environ | {compilation.VARIABLE: "off"}
    with subprocess.Popen(command, env=environment) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)  # also where this process is interrupted
        while process.poll() is None:
            lines = read_log(out)
            with contextlib.suppress(OSError, KeyError):  # it is ending
                now = memory(process.pid)
                resident["peak"] = now["peak"]
                if 0 < len(lines) - start < saves:
                    resident["step"] = max(resident["step"], now["resident"])
            if kill is not None and lines and lines[-1]["step"] >= kill and newest(out):
                return resident
            time.sleep(PAUSE)
    if process.returncode or kill is not None:
        raise SystemExit(f"the run ended with {process.returncode}, as above; nothing is written")
    return resident


def read_log(out: Path) -> list[dict[str, Any]]:
    """The steps that a run has logged."""
    log = out / "log.jsonl"
    text = log.read_text("utf-8") if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def compile_step(recipe: Recipe, data_folder: Path) -> tuple[TrainingMemory, int]:
    """The plan of a step, and the resident bytes of this process once it has compiled the step."""
    plan = training.plan_memory(setting_of(recipe, data.read(data_folder)))
    return plan, memory()["resident"]


def read_exported(recipe: Recipe, tokens: DataFolder, folder: Path) -> dict[str, Any]:
    """The exported model: its validation loss, and the loss of several contexts in one stream."""
    llm, setting = models.load(folder, "float32"), setting_of(recipe, tokens)
    front = list(setting.front)

    def losses(run: np.ndarray, policy: str) -> np.ndarray:
        token_losses, *_ = gather(models.losses(llm, [*front, *run[len(front) :]], policy))
        return token_losses

    run_losses = [losses(run, "full") for part in validation(setting, tokens) for run in part]
    long = data.batch(tokens, "valid", 0, 0, 1, CONTEXTS * recipe.context)[0]
    cached = recipe.context // 2
    policy = f"streaming:sinks={SINKS},window={cached - SINKS}"
    streamed = np.array_split(losses(long, policy), CONTEXTS)
    return {
        "valid_loss": float(np.mean(run_losses)),
        "policy": policy,
        "loss_by_context": [float(part.mean()) for part in streamed],
    }


MEASURE = Measure(
    "rehearsal", measure, FLAGS, data=lambda options: [options.data / "manifest.json"]
)

if __name__ == "__main__":
    run(MEASURE)
