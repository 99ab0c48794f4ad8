"""Comparable times: the variants alternate in one process, round after round."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.evals.lib.record import spread
from jaxkv.models import Llm, Sampling, Stream
from jaxkv.models.generation.decoding import BLOCK

Variant = Callable[[], float]  # does the work once and returns the seconds it took


def time_rounds(
    variants: Mapping[str, Callable[[], Any]], count: int, title: str, warm_up: bool = True
) -> dict[str, list[Any]]:
    """Seconds, or what else it returns, of every variant in every round; after a warm-up round.

    Every other round runs in reverse, so that no variant always follows the same one.
    """
    names = list(variants)
    results: dict[str, list[Any]] = {name: [] for name in names}
    start = perf_counter()
    for number in range(0 if warm_up else 1, count + 1):
        for name in names if number % 2 else reversed(names):
            result = variants[name]()
            if number:
                results[name].append(result)
        if sys.stderr.isatty():
            seconds_left = (perf_counter() - start) / (number + 1) * (count - number)
            print(f"\r{title}: round {number} of {count}, {seconds_left:.0f} s left ", end="",
                  file=sys.stderr, flush=True)  # fmt: skip
    print(f"{title}: {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return results


def timed(work: Callable[[], object]) -> Variant:
    """A variant from a function that blocks until its work is done."""

    def run() -> float:
        start = perf_counter()
        work()
        return perf_counter() - start

    return run


def next_token(llm: Llm, ids: Sequence[int], policy: str) -> int:
    """Prefill of one prompt; the most probable next token."""
    stream = Stream(llm, policy, tokens=len(ids))
    stream.prefill([ids])
    stream.finish_prefill()
    return int(jnp.argmax(stream.decoding.logits[0]))


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The ratio of two variants, round by round, because both share a round's disturbances."""
    return spread(np.asarray(over) / np.asarray(under))


def rate(tokens: int, seconds: Sequence[float]) -> dict[str, float]:
    """Tokens per second."""
    return spread(tokens / np.asarray(seconds))


def fastest(seconds: Mapping[str, Sequence[float]], *kinds: str) -> str:
    """The name of the variant with the lowest median among those with a name prefix."""
    return min((n for n in seconds if n.startswith(kinds)), key=lambda n: np.median(seconds[n]))


def bar(name: str, value: dict[str, float] | float, sense: str, bound: float) -> dict[str, object]:
    """Compare a measured number with its bar; the median decides."""
    middle = value["median"] if isinstance(value, dict) else value
    met = middle >= bound if sense == ">=" else middle <= bound
    return {"bar": name, "value": value, "ask": f"{sense} {bound:g}", "met": bool(met)}


def decode_variant(stream: Stream, tokens: int) -> Variant:
    """Generates this many tokens per sequence, always from the stream's current state."""
    lengths = stream.lengths
    stream.reserve(tokens)  # not part of the measured time
    start = jax.tree.map(jnp.copy, stream.decoding)

    def run() -> float:
        stream.lengths = lengths  # else a growing cache would reserve in every round
        stream.decoding = jax.block_until_ready(jax.tree.map(jnp.copy, start))
        began = perf_counter()
        generate_greedy(stream, tokens)
        return perf_counter() - began

    return run


def decode_after_prompt(llm: Llm, policy: str, length: int, new: int, batch: int = 1) -> Variant:
    """Generates `new` tokens per sequence, always after its prompt of `length` random tokens."""
    stream = Stream(llm, policy, batch, tokens=length + new)
    stream.prefill([prompt(llm, length, seed) for seed in range(batch)])
    stream.finish_prefill()
    return decode_variant(stream, new)


def generate_greedy(stream: Stream, tokens: int) -> None:
    """Generate this many greedy tokens per sequence, ignoring the end of text."""
    for _ in range(math.ceil(tokens / BLOCK)):
        stream.decode(Sampling(), min(BLOCK, tokens), ())
        tokens -= BLOCK


def prompt(llm: Llm, tokens: int, seed: int = 0) -> list[int]:
    """Random tokens without the first ids, which are special in most vocabularies."""
    return np.random.default_rng(seed).integers(3, llm.config.vocab, tokens).tolist()


def compile_timed(program: Any, *arguments: Any) -> tuple[list[float], Any]:
    """Seconds to trace, lower and compile a jitted function, and the compiled program."""
    times = [perf_counter()]
    traced = program.trace(*arguments)
    times.append(perf_counter())
    lowered = traced.lower()
    times.append(perf_counter())
    compiled = lowered.compile()
    times.append(perf_counter())
    return np.diff(times).tolist(), compiled
