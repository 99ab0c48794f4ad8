"""Recorded requests through the engine and the default model, with and without prefix caching.

Lengths are divided, because the model is small: 512 tokens of Mooncake's traces become one chunk.
The tokens of a block are derived from its id. All requests are queued at the start, so the engine
is never idle; time to first token starts when a request leaves the queue.
"""

from __future__ import annotations

import csv
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import ROOT, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import ratio, time_rounds
from jaxkv.evals.prefix_caching import report, traces
from jaxkv.evals.prefix_caching.traces import MOONCAKE_BLOCK, Trace
from jaxkv.models import Llm
from jaxkv.models.generation.serving import make_engine
from jaxkv.serve.engine import Engine, PrefixConfig, Request, answer

TRACES = ROOT.parent / "shared" / "data" / "traces"
FILES = {
    "mooncake": "mooncake_conversation_trace.jsonl",
    "azure": "AzureLLMInferenceTrace_conv.csv",
    "sessions": "sweagent_trajectories.jsonl",
}
FIRST_ID = 3  # of the vocabulary; smaller ids are special tokens
STREAMING, BALANCED = (
    "streaming:sinks=4,window=252",
    "balance-stream:sinks=4,window=124,levels=3,block=64",
)
REPORTED = 459.22 / 416.92  # items per second with over without prefix caching, equal prompts


class Load(NamedTuple):
    """Requests, and the chunk size on whose grid they share prefixes."""

    requests: list[Request]
    chunk: int


FLAGS = (
    flag("--traces", TRACES, "the folder of the traces"),
    flag("--rounds", 3, "of each time", minimum=1),
)


def files_of(options: Namespace) -> list[Path]:
    return [options.traces / name for name in FILES.values()]


def measure(run: Run) -> dict[str, Any]:
    """Every load, on the default model."""
    quick, llm = run.options.quick, models.load()
    run.record.add(llm.files)
    shares, count = ((0.5, 1.0), 60) if quick else (report.SHARES, 1000)
    rounds = 1 if quick else run.options.rounds
    results: dict[str, Any] = {"report": {"paper": REPORTED, "shares": {
        f"{share:g}": time_load(llm, report_load(llm, share, count), "full", 16, 4096, rounds,
                                f"the report, p = {share:g}")
        for share in shares
    }}}  # fmt: skip
    loads: dict[str, Callable[[Path], Load]] = {
        "mooncake": lambda file: mooncake(llm, file, 30 if quick else 500, 8),
        "azure": lambda file: azure(llm, file, 30 if quick else 500, 8),
        "sessions": lambda file: sessions(traces.read(file), 20 if quick else 100),
    }
    for name, file in zip(FILES, files_of(run.options), strict=True):
        load = loads[name](file)
        results[name] = {
            policy: time_load(llm, load, policy, 16, 512, rounds, f"{name}, {policy}")
            for policy in (STREAMING, BALANCED)
        }
    return results


def mooncake(llm: Llm, path: Path, count: int, divide: int) -> Load:
    """The first requests of a trace, with lengths divided by `divide`."""
    chunk, requests = MOONCAKE_BLOCK // divide, []
    with path.open(encoding="utf-8") as file:
        for row in map(json.loads, islice(file, count)):
            ids = np.concatenate([tokens_of(llm, number, chunk) for number in row["hash_ids"]])
            size = max(1, row["input_length"] // divide)
            new = max(1, row["output_length"] // divide)
            requests.append(Request(tuple(ids[:size].tolist()), new, seed=len(requests)))
    return Load(requests, chunk)


def tokens_of(llm: Llm, number: int, count: int) -> np.ndarray:
    """The tokens of a block, derived from its id."""
    return np.random.default_rng(number).integers(FIRST_ID, llm.config.vocab, count)


def azure(llm: Llm, path: Path, count: int, divide: int) -> Load:
    """The first lengths of a trace, each with a different text."""
    with path.open(encoding="utf-8", newline="") as file:
        requests = [
            Request(
                tuple(tokens_of(llm, n, max(1, int(row["ContextTokens"]) // divide)).tolist()),
                max(1, int(row["GeneratedTokens"]) // divide), seed=n,
            )
            for n, row in enumerate(islice(csv.DictReader(file), count))
        ]  # fmt: skip
    return Load(requests, MOONCAKE_BLOCK // divide)


def sessions(trace: Trace, count: int, chunk: int = 128) -> Load:
    """The first turns of recorded agents, with answers of 8 tokens."""
    turns = trace.requests[:count]
    return Load([Request(tuple(map(int, turn.keys)), 8) for turn in turns], chunk)


def report_load(llm: Llm, share: float, count: int, block: int = 8) -> Load:
    """The report's generator: prompts of 15 tokens, which fill one block of 8."""
    setting, rng = report.ReplaySetting(p=share, requests=count), np.random.default_rng(0)
    prompts = report.draw_prompts(setting, rng, (FIRST_ID, llm.config.vocab))
    new = rng.integers(setting.outputs[0], setting.outputs[1] + 1, count).tolist()
    numbered = enumerate(zip(prompts, new, strict=True))
    return Load(
        [Request(tuple(tokens), new_tokens, seed=n) for n, (tokens, new_tokens) in numbered], block
    )


def time_load(
    llm: Llm, load: Load, policy: str, max_batch: int, num_blocks: int, count: int, title: str
) -> dict[str, Any]:
    """Items per second and seconds to the first token, with and without this many cached prefixes.

    Raises RuntimeError if prefix caching changes an answer.
    """
    longest = max(len(request.tokens) + request.max_new_tokens for request in load.requests)
    engines = {
        name: make_engine(llm, policy, max_batch=max_batch, max_len=longest, chunk=load.chunk,
                        queue=len(load.requests), queue_tokens=2**31 - 1, prefix_cache=prefixes)
        for name, prefixes in (("none", None), ("cached", PrefixConfig(num_blocks=num_blocks)))
    }  # fmt: skip
    answers: dict[str, list] = {}

    def all_of_them(name: str) -> float:
        engines[name].reset_prefix_cache()
        start = perf_counter()
        answers[name] = answer(engines[name], load.requests)
        return perf_counter() - start

    seconds = time_rounds(
        {name: lambda name=name: all_of_them(name) for name in engines}, count, title
    )
    if [reply.tokens for reply in answers["cached"]] != [reply.tokens for reply in answers["none"]]:
        raise RuntimeError(f"{title}: prefix caching changes answers")
    return summary(load, answers, seconds, engines["cached"]) | {
        "policy": policy, "max_batch": max_batch, "prefixes": num_blocks,
    }  # fmt: skip


def summary(
    load: Load, answers: dict[str, Sequence], seconds: dict[str, list[float]], engine: Engine
) -> dict[str, Any]:
    cached = sum(reply.outcome.cached_tokens for reply in answers["cached"])
    return {
        "requests": len(load.requests), "chunk": load.chunk,
        "prompt_tokens": sum(len(request.tokens) for request in load.requests),
        "new_tokens": sum(request.max_new_tokens for request in load.requests),
        "hit_rate_tokens": cached / sum(len(request.tokens) for request in load.requests),
        "bytes_of_prefixes": engine.bytes["prefixes"],
        "items_per_second": {
            name: spread(len(load.requests) / np.asarray(took)) for name, took in seconds.items()
        },
        "times_faster": ratio(seconds["none"], seconds["cached"]),
        "first_token_seconds": {name: first_tokens(ones) for name, ones in answers.items()},
    }  # fmt: skip


def first_tokens(answers: Iterable) -> dict[str, float]:
    """Seconds from leaving the queue to the first token."""
    seconds = [reply.outcome.first_token_seconds - reply.outcome.queue_seconds for reply in answers]
    return {"median": float(np.median(seconds)), "p90": float(np.quantile(seconds, 0.9))}


MEASURE = Measure("prefix_engine", measure, FLAGS, data=files_of)

if __name__ == "__main__":
    run(MEASURE)
