"""Host time of the engine: how much longer its steps take than their programs, by function.

Sixteen sequences decode. Steps of the engine alternate with as many calls of its decode program,
which do not wait for each other. The engine dispatches a step before it delivers the one before, so
host and device overlap, and the difference is the host time that does not. On a CPU the two also
share the cores. A profile then lists the functions by their own time, without the wait for the
device; the profiler itself slows those that are called often.
"""

from __future__ import annotations

import cProfile
import pstats
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import Record, make_parser, run_command, spread
from jaxkv.evals.lib.text import passage
from jaxkv.evals.lib.timing import Variant, bar, time_rounds, timed
from jaxkv.evals.lib.verdict import Statement, below
from jaxkv.models.generation.serving import make_engine
from jaxkv.models.loading.llm import Llm
from jaxkv.serve.engine import Engine, Request

POLICY = "streaming:sinks=4,window=252"
BATCH, PROMPT = 16, 64  # sequences, and tokens of their prompts
NEW = 2**20  # tokens of an answer: none ends here
CALLS = 32  # of a measurement
MODELS = {"default model": ((), 0.10), "SmolLM2-135M": (("smollm2-135m",), 0.03)}  # largest share
FUNCTIONS = 12  # the longest of the profile
WAIT = ("delivery.py on_host", "api.py block_until_ready")  # functions that wait for the device


class Ignore:
    """A listener that does nothing."""

    def prompt(self, scored: object) -> None:
        """Receive the prompt."""

    def token(self, scored: object) -> bool:
        """Receive a token."""
        return False

    def done(self, outcome: object) -> None:
        """Receive the outcome."""


def main() -> None:
    parser = make_parser("jaxkv.evals.speed.host_time", __doc__)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="write to out/, which no claim reads")
    options = parser.parse_args()
    loaded = {name: models.load(*MODELS[name][0], dtype="float32") for name in options.only}
    files = [file for llm in loaded.values() for file in llm.files]
    record = Record("host_time", files, quick=options.quick)
    by_model = {name: measure(llm, options.rounds, name) for name, llm in loaded.items()}
    bars = [
        bar(f"engine of 16 sequences, share of a step outside XLA, {name}", row["share"], "<=",
            MODELS[name][1]) for name, row in by_model.items()
    ]  # fmt: skip
    record.finish({"policy": POLICY, "batch": BATCH, "models": by_model, "bars": bars})


def measure(llm: Llm, rounds: int, name: str) -> dict[str, Any]:
    """Steps against their programs, and the profile of the steps."""
    engine = make_engine(llm, POLICY, max_batch=BATCH)
    text = passage(llm, BATCH * PROMPT)
    for start in range(0, BATCH * PROMPT, PROMPT):
        engine.submit(Request(tuple(text[start : start + PROMPT]), NEW, seed=start), Ignore())
    while engine.running < BATCH or engine.waiting or engine._prefills:
        engine.step()

    def steps() -> None:
        for _ in range(CALLS):
            engine.step()
        jax.block_until_ready(engine._running._batch)  # the last step is not delivered yet

    seconds = time_rounds({"engine": timed(steps), "programs": programs(engine)}, rounds, name)
    alone, engine_seconds = (np.array(seconds[key]) for key in ("programs", "engine"))
    return {
        "milliseconds": {key: spread(1e3 / CALLS * np.array(s)) for key, s in seconds.items()},
        "share": spread(1 - alone / engine_seconds),
        "functions": profile(steps),
    }


def programs(engine: Engine) -> Variant:
    """Calls of the decode program for the sequences of an engine."""
    batch, active = engine._running, np.ones(BATCH, bool)

    def calls() -> None:
        for _ in range(CALLS):
            batch._batch, output = engine._programs.decode(batch._batch, active, scored=False)
        jax.block_until_ready((batch._batch, output))

    return timed(calls)


def profile(steps: Callable[[], None]) -> dict[str, float]:
    """Shares of the time of steps by function, the longest first, without those that wait."""
    profiler = cProfile.Profile()
    profiler.runcall(steps)
    stats = pstats.Stats(profiler).stats
    total, shares = sum(row[2] for row in stats.values()), Counter[str]()
    for (file, _, function), row in stats.items():
        name = function if file == "~" else f"{'/'.join(Path(file).parts[-2:])} {function}"
        if not name.endswith(WAIT):
            shares[re.sub(r" at 0x[0-9a-f]+", "", name)] += row[2] / total
    return dict(shares.most_common(FUNCTIONS))


STATEMENTS = (
    Statement("docs/decisions/engine.md", "at most a tenth of a step of the default model and 3 % "
              "of one of SmolLM2-135M is outside its program", "host_time",
              [below(f"models/{name}/share", bound, sure=False)
               for name, (_, bound) in MODELS.items()]),
)  # fmt: skip


if __name__ == "__main__":
    run_command(main)
