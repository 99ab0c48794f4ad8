"""Start-up time: from the command to the first text, each time in a new process.

The first start fills the compilation cache and is not counted. Besides the time of the whole
command, the compile and run times that it reports are recorded, with and without that cache.
SmolLM2-135M-Instruct, which is downloaded before, shows the time of a model of 30 layers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from jaxkv.evals.lib.record import ROOT, Record, spread
from jaxkv.evals.lib.timing import bar, ratio, time_rounds
from jaxkv.models import smollm2

COMMAND = [sys.executable, "-m", "jaxkv.cli"]
IMPORT = [sys.executable, "-c", "import jax; print()"]
PROMPT, TOKENS = "Once upon a time", "64"


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m jaxkv.evals.speed.startup", description=__doc__)
    ask.add_argument("--model", type=Path, required=True, help="the folder of stories260K")
    ask.add_argument("--rounds", type=int, default=9)
    ask.add_argument("--quick", action="store_true", help="two rounds, into out/")
    given = ask.parse_args()
    files = [given.model / "model.safetensors", smollm2.fetch()]
    record = Record("startup", files, quick=given.quick)
    generate, real = (
        ["generate", PROMPT, "--model", model, "--max-new-tokens", TOKENS]
        for model in (str(given.model.resolve()), smollm2.NAME)
    )

    with tempfile.TemporaryDirectory() as kept:
        variants = {
            "help": partial(first_output, [*COMMAND, "--help"], kept),
            "import jax": partial(
                first_output, [sys.executable, "-c", "import jax; print()"], kept
            ),
            "first text": partial(first_output, [*COMMAND, *generate], kept),
            "first text of SmolLM2": partial(first_output, [*COMMAND, *real], kept),
            "first text of SmolLM2, nothing compiled": partial(
                first_output, [*COMMAND, *real], "off"
            ),
            "compile and run, kept": partial(compile_and_run, generate, kept),
            "compile and run, not kept": partial(compile_and_run, generate, "off"),
        }
        # The warm-up round fills the compilation cache.
        seconds = time_rounds(variants, 2 if given.quick else given.rounds, "startup")
    share = ratio(seconds["compile and run, kept"], seconds["compile and run, not kept"])
    results = {
        "seconds": {name: spread(s) for name, s in seconds.items()},
        "bars": [
            bar("seconds to the first text, with a filled compilation cache",
                spread(seconds["first text"]), "<=", 3),
            bar("seconds to the first text of SmolLM2-135M, with a filled compilation cache",
                spread(seconds["first text of SmolLM2"]), "<=", 3),
            bar("seconds to the first text of SmolLM2-135M, with nothing compiled",
                spread(seconds["first text of SmolLM2, nothing compiled"]), "<=", 8),
            bar("seconds of jaxkv --help", spread(seconds["help"]), "<=", 0.3),
            bar("jaxkv --help over import jax", ratio(seconds["help"], seconds["import jax"]),
                "<=", 1.2),
            bar("compile and run with a filled compilation cache, over without a cache", share,
                "<=", 0.35),
        ],
    }  # fmt: skip
    for line in results["bars"]:
        word = "met    " if line["met"] else "NOT MET"
        print(f"{word} {line['bar']}: {line['value']['median']:.3g} {line['ask']}")
    print("wrote", record.save(results))


def first_output(command: list[str], kept: str) -> float:
    """Seconds from the start of a process to its first byte on standard output."""
    begun = perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment(kept), stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        first = run.stdout.read(1)
        seconds = perf_counter() - begun
        run.stdout.read()
    if run.returncode or not first:
        raise SystemExit(f"{' '.join(command[1:])} ended with {run.returncode}")
    return seconds


def compile_and_run(command: list[str], kept: str) -> float:
    """Seconds of compilation, prefill and decode in one process, without imports and loading."""
    done = subprocess.run([*COMMAND, *command, "--json"], cwd=ROOT, env=environment(kept),
                          stdout=subprocess.PIPE, check=True)  # fmt: skip
    reported = json.loads(done.stdout)
    return float(np.sum([reported[f"{part}_seconds"] for part in ("compile", "prefill", "decode")]))


def environment(kept: str) -> dict[str, str]:
    return os.environ | {"JAXKV_COMPILATION_CACHE": kept}


if __name__ == "__main__":
    main()
