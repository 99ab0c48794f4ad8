"""Start-up time: from the command to the first text, each time in a new process.

`starts` measures one answer of many commands, `chat` every message of a chat with SmolLM2-135M.

The first start fills the compilation cache and is not counted. Without the cache everything is
compiled. SmolLM2-135M-Instruct, which is downloaded before, shows a model of 30 layers: under each
kind of policy, and in the engine, which compiles all its programs before it serves. `depths` has
the seconds of tracing, lowering and compiling the programs of that model with other numbers of
layers; its weights are only shapes.

The first message of a chat is there when it starts, so its seconds contain imports, loading and
compilation. A cold chat has an empty compilation cache; the chat after it has the cache that the
cold one filled. The fourth message is a page long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import jax
import numpy as np

from jaxkv import defaults, models
from jaxkv.evals.lib.record import ROOT, read, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.timing import bar, compile_timed, ratio, time_rounds
from jaxkv.evals.lib.verdict import Statement, above, within
from jaxkv.models.generation.decoding import compiled_decode_block, prefill_programs
from jaxkv.models.loading import smollm2
from jaxkv.models.loading.llm import Llm, without_weights
from jaxkv.models.loading.source import open_source
from jaxkv.models.loading.weight_names import shapes
from jaxkv.models.tools.passage import PASSAGE

COMMAND = [sys.executable, "-m", "jaxkv.cli"]
IMPORT = [sys.executable, "-c", "import jax; print()"]
ENGINE = f"""
import sys
from jaxkv import models
from jaxkv.models.generation.serving import make_engine
make_engine(models.load("{smollm2.NAME}"), "{defaults.POLICY}")
print("ready")
"""
PROMPT, TOKENS = "Once upon a time", "64"
# Policies other than the default, with the most that their start may take over its start.
POLICIES = {"reservoir": 3, "balance-stream": 3, "magicpig": 4}
DEPTHS, CHUNK = (4, 12, 30, 80), 256
PAGE = 2_000  # letters of the long message
END = "tokens/s"  # the line after an answer, on standard error


def measure(run: Run) -> dict[str, Any]:
    """The starts of many commands, or the messages of a chat."""
    rounds = 1 if run.options.quick else run.options.rounds
    if run.options.subject == "chat":
        return chats(smollm2.NAME, messages(), rounds)
    jax.config.update("jax_enable_compilation_cache", False)  # of this process alone
    depths = by_depth(DEPTHS[:2] if run.options.quick else DEPTHS, rounds)
    with tempfile.TemporaryDirectory() as folder:
        seconds = time_rounds(variants(folder), rounds, "startup")
    spreads = {name: spread(values) for name, values in seconds.items()}
    return {"seconds": spreads, "depths": depths, "bars": bars(seconds, depths)}


def variants(folder: str) -> dict[str, Callable[[], float]]:
    """Every measured start. folder: the folder of the compilation cache, which starts empty."""
    generate = ["generate", PROMPT, "--max-new-tokens", TOKENS, "--temperature", "0"]
    real = [*COMMAND, *generate, "--model", smollm2.NAME]
    engine = [sys.executable, "-c", ENGINE]
    starts = {
        "help": partial(first_output, [*COMMAND, "--help"], folder),
        "import jax": partial(first_output, IMPORT, folder),
        "first text": partial(first_output, [*COMMAND, *generate], folder),
        "compile and run, cached": partial(compile_and_run, generate, folder),
        "compile and run, not cached": partial(compile_and_run, generate, "off"),
    }
    for suffix, cache in (("", folder), (", nothing compiled", "off")):
        starts[f"first text of SmolLM2{suffix}"] = partial(first_output, real, cache)
        starts[f"engine of SmolLM2{suffix}"] = partial(first_output, engine, cache)
        for policy in POLICIES:
            command = [*real, "--policy", policy]
            starts[f"first text of SmolLM2, {policy}{suffix}"] = partial(
                first_output, command, cache
            )
    return starts


def bars(
    seconds: Mapping[str, list[float]], depths: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, object]]:
    """The promises about start-up, and whether they are met."""
    real = "first text of SmolLM2"
    lines = [
        bar("seconds to the first text, with a filled compilation cache",
            spread(seconds["first text"]), "<=", 3),
        bar("seconds to the first text of SmolLM2-135M, with a filled compilation cache",
            spread(seconds[real]), "<=", 3),
        bar("seconds to the first text of SmolLM2-135M, with nothing compiled",
            spread(seconds[f"{real}, nothing compiled"]), "<=", 8),
        bar("seconds of jaxkv --help", spread(seconds["help"]), "<=", 0.3),
        bar("jaxkv --help over import jax", ratio(seconds["help"], seconds["import jax"]),
            "<=", 1.2),
        bar("compile and run with a filled compilation cache, over without a cache",
            ratio(seconds["compile and run, cached"], seconds["compile and run, not cached"]),
            "<=", 0.35),
    ]  # fmt: skip
    for policy, bound in POLICIES.items():
        for suffix in ("", ", nothing compiled"):
            share = ratio(seconds[f"{real}, {policy}{suffix}"], seconds[f"{real}{suffix}"])
            lines.append(bar(f"first text of SmolLM2-135M under {policy} over streaming"
                             f"{suffix or ', with a filled compilation cache'}",
                             share, "<=", bound))  # fmt: skip
    if {"12", "80"} <= set(depths):
        share = depths["80"]["seconds"]["median"] / depths["12"]["seconds"]["median"]
        lines.append(bar("seconds to compile prefill and decoding of 80 layers over 12 layers",
                         share, "<=", 3))  # fmt: skip
    return lines


def by_depth(depths: tuple[int, ...], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds to trace, lower and compile prefill and decoding of SmolLM2 with other depths."""
    llm = without_weights(open_source(smollm2.NAME))
    seconds: dict[str, list[dict[str, list[float]]]] = {str(depth): [] for depth in depths}
    for _ in range(rounds):
        for depth in depths:
            seconds[str(depth)].append(programs(of_depth(llm, depth)))
    return {
        depth: {
            "seconds": spread([sum(map(sum, seconds_of.values())) for seconds_of in runs]),
            # Of each program: the median seconds of tracing, lowering and compiling.
            **{
                name: np.median([seconds_of[name] for seconds_of in runs], axis=0).tolist()
                for name in runs[0]
            },
        }
        for depth, runs in seconds.items()
    }


def of_depth(llm: Llm, depth: int) -> Llm:
    config = replace(llm.config, layers=depth, windows=(None,) * depth)
    dtype = np.dtype(llm.dtype)
    named = shapes(config).items()
    weights = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (_, shape) in named}
    return replace(llm, config=config, weights=weights)


def programs(llm: Llm) -> dict[str, list[float]]:
    """Seconds to trace, lower and compile the programs of prefill and decoding."""
    stream, sampling = models.Stream(llm), models.Sampling()
    decode = stream.decode_arguments(stream.decoding, sampling, llm.eos, 1)
    asked = [("decode", compiled_decode_block(), *decode)]
    asked += [
        ("prefill", *arguments)
        for arguments in prefill_programs(stream.static, llm.weights, stream.decoding, CHUNK)
    ]
    seconds_of = {"decode": [0.0] * 3, "prefill": [0.0] * 3}
    jax.clear_caches()
    for name, program, *arguments in asked:
        seconds, _ = compile_timed(program, *arguments)
        seconds_of[name] = np.add(seconds_of[name], seconds).tolist()
    return seconds_of


def first_output(command: list[str], folder: str) -> float:
    """Seconds from the start of a process to its first byte on standard output."""
    start = perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(folder), stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        first = run.stdout.read(1)
        seconds = perf_counter() - start
        run.stdout.read()
    if run.returncode or not first:
        raise SystemExit(f"{' '.join(command[1:])} ended with {run.returncode}")
    return seconds


def compile_and_run(command: list[str], folder: str) -> float:
    """Seconds of compilation, prefill and decode in one process, without imports and loading."""
    done = subprocess.run([*COMMAND, *command, "--json"], cwd=ROOT, env=environment(folder),
                          stdout=subprocess.PIPE, check=True)  # fmt: skip
    reported = json.loads(done.stdout)
    return float(np.sum([reported[f"{part}_seconds"] for part in ("compile", "prefill", "decode")]))


def environment(folder: str) -> dict[str, str]:
    """With this folder as the compilation cache, also where JAX was given another one."""
    inherited = {
        name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
    }
    return inherited | {"JAXKV_COMPILATION_CACHE": folder}


def messages() -> list[str]:
    page = " ".join(PASSAGE.read_text("utf-8")[:PAGE].split())
    return ["Hello!", "Who wrote the play Hamlet?", "Tell me a short story about a lighthouse.",
            f"What happens here? {page}", "Why?", "Thank you."]  # fmt: skip


def chats(model: str, asked: list[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Of each message, the seconds in a cold and in a warm chat."""
    seconds: dict[str, list[list[float]]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for of_kind in seconds.values():
                of_kind.append(chat(model, asked, folder))
    return {
        name: [spread(turn) for turn in np.transpose(of_kind).tolist()]
        for name, of_kind in seconds.items()
    }


def chat(model: str, asked: list[str], folder: str) -> list[float]:
    """The seconds of every message. folder: folder of the compilation cache."""
    command = [*COMMAND, "chat", "--model", model, "--max-new-tokens", "24", "--temperature", "0"]
    seconds, start = [], perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(folder), bufsize=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        for message in asked:
            process.stdin.write(message.encode() + b"\n")
            first = process.stdout.read(1)
            seconds.append(perf_counter() - start)
            if not first or not any(END in line.decode() for line in process.stderr):
                raise SystemExit(f"{' '.join(command[1:])} ended in turn {len(seconds)}")
            os.read(process.stdout.fileno(), 1 << 16)  # the rest of the answer, which is short
            start = perf_counter()
        process.stdin.close()
    return seconds


def chat_table() -> str:
    """Seconds to the first text, by compilation cache and message."""
    lines = table_head("compilation cache", "from the command", "short message", "page")
    for label, seconds in zip(("empty", "filled"), read("chat")["results"].values(), strict=True):
        cells = (ranged(seconds[turn], "median", ".2f") for turn in (0, 1, 3))
        lines.append(table_row(label, *cells))
    return page_table(lines)


TABLES = {"chat": chat_table}
STATEMENTS = (
    Statement("evals/NEGATIVE.md", "takes over 8 seconds longer at 80 layers than at 12", "startup",
              [above("depths/80/decode/2", "depths/12/decode/2", by=8)]),
    Statement("evals/NEGATIVE.md", "Prefill is one program per layer, and takes as long at either "
              "depth", "startup", [within("depths/80/prefill/2", "depths/12/prefill/2", by=0.1)]),
    Statement("docs/decisions/compilation.md", "no later turn compiles", "chat",
              [within(f"cold/{turn}", f"warm/{turn}", by=0.05, sure=False)
               for turn in range(1, 6)]),
)  # fmt: skip

RECORDS = {"starts": "startup", "chat": "chat"}  # by subject
MEASURE = Measure(
    lambda options: RECORDS[options.subject], measure,
    [flag("subject", choices=RECORDS), flag("--rounds", 3, "of each measurement", minimum=1)],
    data=lambda options: [smollm2.fetch(), *([PASSAGE] if options.subject == "chat" else [])],
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
