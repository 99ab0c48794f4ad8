"""Throughput of the engine, time to first token with prefix hits, and the cost of misses.

The default model and books; compared variants alternate in one process. `throughput`: answers per
second with 64 concurrent requests, and one at a time with models.generate, with an engine of
max_batch=1 and with the same engine. `first`: time to first token of a new prompt of 4,096 tokens
and of a cached one. `cost`: new prompts only, with and without prefix caching.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.lib.record import ROOT, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import bar, ratio, time_rounds, timed
from jaxkv.evals.lib.verdict import Statement, above, below
from jaxkv.models import Llm
from jaxkv.models.generation.serving import make_engine
from jaxkv.serve.engine import Engine, PrefixConfig, Request, answer

BOOKS = ROOT.parent / "shared" / "data" / "text" / "books" / "valid"
POLICIES = ("streaming:sinks=4,window=252", "full")
AT_ONCE, LONG = 64, 4096
FASTER, SOONER, DEARER = 3.0, 0.25, 1.03  # bars: minimum, maximum, maximum


FLAGS = (
    flag("--texts", BOOKS, "a folder of books"),
    flag("--rounds", 5, "of each measurement", minimum=1),
)


def books_of(options: Namespace) -> list[Path]:
    """The books of --texts; raises UserError where it has none."""
    files = sorted(options.texts.glob("*.txt"))
    if not files:
        raise UserError(f"--texts must hold books, got {options.texts}; name another folder")
    return files


def measure(run: Run) -> dict[str, Any]:
    """All parts on the default model, with their bars."""
    llm = models.load()
    run.record.add(llm.files)
    texts = [llm.tokenizer.encode(file.read_text("utf-8")) for file in books_of(run.options)]
    results: dict[str, Any] = {"bars": []}
    for name, part in PARTS.items():
        results[name] = part(llm, texts, run.options.rounds, run.options.quick)
        results["bars"] += results[name].pop("bars", [])
    return results


def passages(texts: Sequence[Sequence[int]], seed: int = 0) -> Iterator[tuple[int, ...]]:
    """An endless stream of random stretches of books."""
    rng = np.random.default_rng(seed)
    while True:
        text = texts[int(rng.integers(len(texts)))]
        begin = int(rng.integers(0, len(text) - LONG - 1))
        yield tuple(text[begin : begin + LONG])


def drawn(texts: Sequence[Sequence[int]], count: int, seed: int) -> list[Request]:
    """Prompts of 16 to 255 tokens, answers of 32 to 192, the mean 112 of the report."""
    rng = np.random.default_rng(seed)
    prompts = itertools.islice(passages(texts, seed), count)
    return [
        Request(tokens[: int(rng.integers(16, 256))], int(rng.integers(32, 193)), seed=number)
        for number, tokens in enumerate(prompts)
    ]


def throughput(llm: Llm, texts: Sequence[Sequence[int]], count: int, quick: bool) -> dict[str, Any]:
    """Answers per second: 64 at a time, and one at a time."""
    slots = 16 if quick else AT_ONCE
    asked = drawn(texts, 4 * slots, 0)
    alone = asked[: len(asked) // 8]
    many, single = (make_engine(llm, max_batch=max_batch) for max_batch in (slots, 1))

    def one_by_one(engine: Engine) -> None:
        for request in alone:
            answer(engine, [request])

    def generated() -> None:
        for request in alone:
            settings = {"max_new_tokens": request.max_new_tokens, "ignore_eos": True}
            models.generate(llm, request.tokens, temperature=0, **settings)

    seconds = time_rounds(
        {
            "alone, models.generate": timed(generated),
            "together": timed(lambda: answer(many, asked)),
            "alone, an engine with max_batch=1": timed(lambda: one_by_one(single)),
            "alone, the same engine": timed(lambda: one_by_one(many)),
        }, count, "throughput",
    )  # fmt: skip
    together = np.asarray(seconds["together"]) / len(asked)
    one_at_a_time = {
        name: np.asarray(taken) / len(alone)
        for name, taken in seconds.items()
        if name != "together"
    }
    request_seconds = {"together": together} | one_at_a_time
    times = {name: ratio(taken, together) for name, taken in one_at_a_time.items()}
    return {
        "requests": len(asked), "at_a_time": slots, "alone": len(alone),
        "items_per_second": {name: spread(1 / taken) for name, taken in request_seconds.items()},
        "times": times,
        "bars": [
            bar(f"answers per second, {slots} at a time over one at a time, "
                f"{name.removeprefix('alone, ')}", times_faster, ">=", FASTER)
            for name, times_faster in times.items()
        ],
    }  # fmt: skip


def first(llm: Llm, texts: Sequence[Sequence[int]], count: int, quick: bool) -> dict[str, Any]:
    """Time to first token of a long prompt, new and cached."""
    size = 512 if quick else LONG
    results: dict[str, Any] = {"prompt_tokens": size, "policies": {}, "bars": []}
    for policy in POLICIES:
        engine = make_engine(
            llm, policy, max_batch=2, max_len=2 * LONG, prefix_cache=PrefixConfig(num_blocks=256)
        )
        held = next(passages(texts, 2))[:size]
        answer(engine, [Request(held, 1)])
        variants = {
            "miss": new_prompts(engine, texts, 1, size),
            "hit": partial(to_first, engine, held, (size - 1) // engine.chunk * engine.chunk),
        }
        seconds = time_rounds(variants, 4 * count, f"first token, {policy}")
        share = ratio(seconds["hit"], seconds["miss"])
        by_variant = {name: spread(taken) for name, taken in seconds.items()}
        results["policies"][policy] = {"seconds": by_variant, "share": share}
        name = f"time to first token, a hit over a miss, {size} tokens, {policy}"
        results["bars"].append(bar(name, share, "<=", SOONER))
    return results


def new_prompts(
    engine: Engine, texts: Sequence[Sequence[int]], seed: int, size: int
) -> Callable[[], float]:
    """The time to first token of another prompt in each call, which is not cached."""
    new = passages(texts, seed)
    return lambda: to_first(engine, next(new)[:size], 0)


def to_first(engine: Engine, tokens: tuple[int, ...], cached: int) -> float:
    """Time to first token; raises RuntimeError if another number of tokens was cached."""
    (got,) = answer(engine, [Request(tokens, 1)])
    if got.outcome.cached_tokens != cached:
        raise RuntimeError(f"{cached} tokens were to be cached, {got.outcome.cached_tokens} were")
    return got.outcome.first_token_seconds


def cost(llm: Llm, texts: Sequence[Sequence[int]], count: int, quick: bool) -> dict[str, Any]:
    """Cost of prefix caching for new prompts: look-up and storage."""
    size = 512 if quick else LONG // 2
    results: dict[str, Any] = {"policies": {}, "bars": []}
    for policy in POLICIES:
        variants = {}
        for name, prefixes in (("none", None), ("cached", PrefixConfig(num_blocks=64))):
            engine = make_engine(llm, policy, max_batch=2, max_len=LONG, prefix_cache=prefixes)
            variants[name] = new_prompts(engine, texts, 3, size)
        seconds = time_rounds(variants, 12 * count, f"cost of a miss, {policy}")
        over = ratio(seconds["cached"], seconds["none"])
        by_variant = {name: spread(taken) for name, taken in seconds.items()}
        results["policies"][policy] = {"prompt_tokens": size, "over": over, "seconds": by_variant}
        name = "time to first token, a miss over an engine without prefix caching"
        results["bars"].append(bar(f"{name}, {size} tokens, {policy}", over, "<=", DEARER))
    return results


PARTS = {"throughput": throughput, "first": first, "cost": cost}

STATEMENTS = (
    Statement("evals/NEGATIVE.md", "It is met against an engine with `max_batch=1`", "serving",
              [above("throughput/times/alone, an engine with max_batch=1", FASTER, sure=False)]),
    Statement("evals/NEGATIVE.md", "It is missed against `models.generate`", "serving",
              [below("throughput/times/alone, models.generate", FASTER)]),
)  # fmt: skip

MEASURE = Measure("serving", measure, FLAGS, data=books_of)

if __name__ == "__main__":
    run(MEASURE)
