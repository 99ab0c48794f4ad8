"""What requests of one engine do to each other: stalls, several clients, and cached prompts.

SmolLM2-135M-Instruct in float32 and books, in one process, under full attention and the default
policy. Variants alternate, round by round.

`stalls`: one answer runs, and prompts arrive one after another. A stall is the time between two
tokens of the answer while a prompt is prefilled, less the median time between two tokens alone.
`divided` pauses a prefill after 30 ms, as `jaxkv serve` does; `chunkwise` prefills a chunk between
two tokens.
`clients`: tokens per second of clients that answer at the same time, between the first token of
the last one and the end of the first one. `hits`: the time to first token of a prompt whose prefix
is cached, over the time of one decoding step of the same engine. Run it on an idle machine.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import partial
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np

from jaxkv import defaults, models
from jaxkv.evals.benchmarks.serving import BOOKS, books_of, passages
from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.table import ranged, table
from jaxkv.evals.lib.timing import bar, ratio, time_rounds
from jaxkv.models.generation.serving import make_engine
from jaxkv.serve.engine import (
    Engine,
    Outcome,
    PrefixConfig,
    Request,
    RequestHandle,
    ScoredToken,
)

POLICIES = ("full", defaults.POLICY)
CLIENTS, MAX_LEN = 4, 4096
SKIPPED, ALONE = 4, 40  # tokens of the answer alone: a batch shrinks after 64 steps
MEDIAN_STALL, LARGEST_STALL = 0.030, 0.100  # seconds: bars, maximum
FASTER, STEPS = 3.0, 1.5  # bars: minimum of four clients over one, maximum of a hit over a step


class NeighbourSizes(NamedTuple):
    """Tokens of a short prompt, of each long one and of a cached one; new tokens; prompts."""

    short: int = 64
    long: int = 1500
    cached: int = 1024
    new: int = 96
    prompts: int = 4


QUICK = NeighbourSizes(short=8, long=160, cached=128, new=24, prompts=1)


class NeighbourTrial(NamedTuple):
    """What the parts under one policy share. texts: the ids of the books."""

    policy: str
    texts: Sequence[Sequence[int]]
    sizes: NeighbourSizes
    rounds: int


class TimedListener:
    """The times at which tokens of one answer came. ended: set at its end."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ended = threading.Event()
        self.outcome: Outcome | None = None
        self.handle: RequestHandle | None = None

    def prompt(self, scored: list[ScoredToken]) -> None:
        """Nothing asks for the scores of a prompt."""

    def token(self, scored: ScoredToken) -> bool:
        self.times.append(perf_counter())
        return False

    def done(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.ended.set()


def start(engine: Engine, tokens: Sequence[int], new: int) -> TimedListener:
    listener = TimedListener()
    listener.handle = engine.submit(Request(tuple(tokens), new), listener)
    return listener


def finish(*listeners: TimedListener) -> None:
    for listener in listeners:
        listener.ended.wait()


def measure(run: Run) -> dict[str, Any]:
    """All parts under each policy."""
    sizes = QUICK if run.options.quick else NeighbourSizes()
    rounds = 1 if run.options.quick else run.options.rounds
    llm = models.load(run.options.model, dtype="float32")
    run.record.add(llm.files)
    texts = [llm.tokenizer.encode(file.read_text("utf-8")) for file in books_of(run.options)]
    policies: dict[str, Any] = {}
    for policy in POLICIES:
        engines = {
            name: make_engine(
                llm, policy, max_batch=CLIENTS, max_len=MAX_LEN, fixed_batch=False,
                max_stall=max_stall, prefix_cache=PrefixConfig(num_blocks=64),
            )
            for name, max_stall in (("chunkwise", None), ("divided", MEDIAN_STALL))
        }  # fmt: skip
        for engine in engines.values():
            engine.start()
        trial = NeighbourTrial(policy, texts, sizes, rounds)
        policies[policy] = {
            "stalls": stalls(engines, trial),
            "clients": clients(engines["divided"], trial),
            "hits": hits(engines["divided"], trial),
        }
        for engine in engines.values():
            engine.stop()
    return {"sizes": sizes._asdict(), "policies": policies, "bars": bars(policies)}


def stalls(engines: dict[str, Engine], trial: NeighbourTrial) -> dict[str, Any]:
    """Stalls of all rounds by variant, and seconds until a prompt has its first token."""
    new = passages(trial.texts, seed=1)

    def ask(engine: Engine) -> tuple[list[float], list[float]]:
        listener = start(engine, next(new)[: trial.sizes.short], MAX_LEN - trial.sizes.short)
        # Another prompt makes the batch grow, to the size in which stalls are measured.
        finish(start(engine, next(new)[: trial.sizes.short], 1))
        first = len(listener.times) + SKIPPED
        while len(listener.times) < first + ALONE and not listener.ended.is_set():
            sleep(0.001)
        alone = float(np.median(np.diff(listener.times[first:])))
        waits, firsts = [], []
        for _ in range(trial.sizes.prompts):
            begin = perf_counter()
            arrived = start(engine, next(new)[: trial.sizes.long], 1)
            finish(arrived)
            end = perf_counter()
            firsts.append(arrived.outcome.first_token_seconds)
            sleep(4 * alone)  # the gap in which the prompt was inserted must end
            pairs = itertools.pairwise(list(listener.times))
            waits += [b - a - alone for a, b in pairs if b > begin and a < end]
        engine.cancel(listener.handle)
        finish(listener)
        return waits, firsts

    measured = time_rounds(
        {name: partial(ask, engine) for name, engine in engines.items()}, trial.rounds,
        f"stalls, {trial.policy}",
    )  # fmt: skip
    results = {}
    for name, of_rounds in measured.items():
        waits = np.concatenate([waits for waits, _ in of_rounds])
        firsts = np.concatenate([firsts for _, firsts in of_rounds])
        results[name] = {
            "seconds": {"median": float(np.median(waits)), "p99": float(np.percentile(waits, 99)),
                        "max": float(waits.max()), "n": len(waits)},
            "first_token_seconds": spread(firsts),
        }  # fmt: skip
    return results


def clients(engine: Engine, trial: NeighbourTrial) -> dict[str, Any]:
    """Tokens per second of one client and of four."""
    new = passages(trial.texts, seed=2)

    def tokens_per_second(count: int) -> float:
        listeners = [
            start(engine, next(new)[: trial.sizes.short], trial.sizes.new) for _ in range(count)
        ]
        finish(*listeners)
        begin = max(listener.times[0] for listener in listeners)
        end = min(listener.times[-1] for listener in listeners)
        tokens = sum(begin < time <= end for listener in listeners for time in listener.times)
        return tokens / (end - begin)

    rates = time_rounds(
        {str(count): partial(tokens_per_second, count) for count in (1, CLIENTS)}, trial.rounds,
        f"clients, {trial.policy}",
    )  # fmt: skip
    return {
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
        "times": ratio(rates[str(CLIENTS)], rates["1"]),
    }


def hits(engine: Engine, trial: NeighbourTrial) -> dict[str, Any]:
    """Time to first token of cached prompts, in decoding steps."""
    tokens = next(passages(trial.texts, seed=3))
    results = {}
    for rest in (1, engine.chunk // 2):  # tokens after the cached prefix
        prompt = tokens[: trial.sizes.cached + rest]
        finish(start(engine, prompt, 1))

        def ask(prompt: Sequence[int] = prompt) -> tuple[float, float]:
            listener = start(engine, prompt, trial.sizes.new)
            finish(listener)
            if listener.outcome.cached_tokens != trial.sizes.cached:
                raise RuntimeError(f"{listener.outcome.cached_tokens} tokens were cached")
            step = float(np.median(np.diff(listener.times)))
            return listener.outcome.first_token_seconds, step

        pairs = time_rounds({"hit": ask}, 2 * trial.rounds, f"hits, {trial.policy}, {rest} new")[
            "hit"
        ]
        firsts, steps = zip(*pairs, strict=True)
        results[str(rest)] = {
            "first_token_seconds": spread(firsts), "step_seconds": spread(steps),
            "steps": ratio(firsts, steps),
        }  # fmt: skip
    return results


def bars(policies: dict[str, Any]) -> list[dict[str, object]]:
    """Each figure beside its bound."""
    rows = []
    for policy, results in policies.items():
        seconds = results["stalls"]["divided"]["seconds"]
        rows += [
            bar(f"median stall, {policy}", seconds["median"], "<=", MEDIAN_STALL),
            bar(f"largest stall, {policy}", seconds["max"], "<=", LARGEST_STALL),
            bar(f"tokens per second, {CLIENTS} clients over one, {policy}",
                results["clients"]["times"], ">=", FASTER),
        ]  # fmt: skip
        rows += [
            bar(f"steps to the first token of a hit, {rest} new tokens, {policy}",
                hit["steps"], "<=", STEPS)
            for rest, hit in results["hits"].items()
        ]  # fmt: skip
    return rows


def stalls_table() -> str:
    """A row per policy and way to prefill: milliseconds that an answer waits."""
    results = read("neighbours")["results"]
    heads = ("policy", "prefill", "median (ms)", "99 of 100 below (ms)", "largest (ms)",
             "first token of the prompt (s)")  # fmt: skip
    rows = []
    for policy, parts in results["policies"].items():
        for name, stall in parts["stalls"].items():
            milliseconds = (
                f"{1e3 * stall['seconds'][key]:.0f}" for key in ("median", "p99", "max")
            )
            first = ranged(stall["first_token_seconds"], "median", ".2f")
            rows.append((f"`{policy}`", name, *milliseconds, first))
    sizes = results["sizes"]
    caption = f"Prompts of {sizes['long']:,} tokens, which arrive one after another:"
    return table(heads, rows, caption)


def clients_table() -> str:
    """A row per policy: tokens per second of one client and of several, and hits in steps."""
    results = read("neighbours")["results"]
    heads = ("policy", "one client, tokens per second", f"{CLIENTS} clients", "times",
             "steps to the first token of a hit, 1 new token", "64 new tokens")  # fmt: skip
    rows = []
    for policy, parts in results["policies"].items():
        rates = parts["clients"]["tokens_per_second"]
        cells = [ranged(rates[name], "median", ".0f") for name in ("1", str(CLIENTS))]
        cells.append(ranged(parts["clients"]["times"], "median", ".2f"))
        cells += [ranged(hit["steps"], "median", ".2f") for hit in parts["hits"].values()]
        rows.append((f"`{policy}`", *cells))
    return table(heads, rows)


TABLES = {"neighbours_stalls": stalls_table, "neighbours_clients": clients_table}
FLAGS = (
    flag("--model", SMOLLM2, "as of --model elsewhere"),
    flag("--texts", BOOKS, "a folder of books"),
    flag("--rounds", 5, "of each measurement", minimum=1),
)
MEASURE = Measure("neighbours", measure, FLAGS, data=books_of)

if __name__ == "__main__":
    run(MEASURE)
