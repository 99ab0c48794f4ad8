"""Time of sampled caches.

token: time per token over that of `streaming` at equal slots, with all halving included.
compression: compressing a long prompt, against prefill (a Llama of 110 million random weights).
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.baseline import LARGE, SMALL, random_llama
from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import DEFAULT, Measure, Run, flag, run
from jaxkv.evals.lib.table import ranged, table
from jaxkv.evals.lib.timing import bar, decode_variant, prompt, ratio, time_rounds
from jaxkv.evals.lib.verdict import below, claim
from jaxkv.models.loading.compilation import clock
from jaxkv.models.loading.llm import Llm
from jaxkv.policy_spec import parse_policy

SLOTS = 256
STREAMING = f"streaming:sinks=4,window={SLOTS - 4}"
CACHES = {  # of equal slots
    "reservoir": "reservoir:sinks=4,window=124,sample=128",
    "reservoir, weighted": "reservoir:sinks=4,window=124,sample=128,weighted=true",
    "reservoir, geometric": "reservoir:sinks=4,window=124,sample=128,scheme=geometric",
    "stratified": "stratified:sinks=4,window=124,sample=128",
    "balance-stream": "balance-stream:sinks=4,window=124,levels=3,block=64",
    "balance-stream, weighted":
        "balance-stream:sinks=4,window=124,levels=3,block=64,weighted=true",
}  # fmt: skip
LONG = "balance:rounds=2"
DEARER, SHARE = 1.3, 0.1  # upper bars


FLAGS = (
    flag("--written", 10_000, "timed tokens", minimum=1),
    flag("--prompt", 32_768, "length of the compressed prompt", minimum=1),
    flag("--rounds", 7, "rounds per measurement", minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """Both times, with their bars."""
    results = {
        "token": token(run.llm, run.options),
        "compression": time_compression(run.llm, run.options),
    }
    return {"bars": [line for part in results.values() for line in part.pop("bars")], **results}


def token(llm: Llm, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per generated token; the caches alternate."""
    caches = {"streaming": STREAMING, **CACHES}
    variants = {}
    for name, text in caches.items():
        stream = models.Stream(llm, text)
        stream.prefill([prompt(llm, 8 * SLOTS)])
        variants[name] = decode_variant(stream, options.written)
    seconds = time_rounds(variants, options.rounds, f"{options.written:,} tokens")
    ratios = {name: ratio(seconds[name], seconds["streaming"]) for name in CACHES}
    return {
        "slots": SLOTS,
        "tokens": options.written,
        "microseconds": {name: spread(1e6 / options.written * np.array(values))
                         for name, values in seconds.items()},
        "ratio": ratios,
        "bars": [bar("a token of balance-stream over one of streaming, equal slots",
                     ratios["balance-stream"], "<=", DEARER)],
    }  # fmt: skip


def time_compression(llm: Llm, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of prompt compression and of prefill."""
    large, _ = random_llama(SMALL if options.quick else LARGE)
    tokens = prompt(large, options.prompt)
    clock()
    stream = models.Stream(large, LONG, tokens=options.prompt)
    start, compiled = perf_counter(), clock().seconds
    stream.prefill([tokens])
    jax.block_until_ready(stream.decoding)
    reading = perf_counter() - start - (clock().seconds - compiled)

    read_whole, prompt_bytes = jax.tree.map(jnp.copy, stream.decoding), stream.state_bytes
    seconds, bytes_after = [], set()
    for _ in range(options.rounds + 1):  # the first compiles
        stream.decoding, stream.prefill_finished = jax.tree.map(jnp.copy, read_whole), False
        jax.block_until_ready(stream.decoding)
        start = perf_counter()
        stream.finish_prefill()
        jax.block_until_ready(stream.decoding)
        seconds.append(perf_counter() - start)
        bytes_after.add(stream.state_bytes)
    share = spread(np.array(seconds[1:]) / reading)
    return {
        "policy": LONG,
        "prompt": options.prompt,
        "reading_seconds": reading,  # once
        "state_bytes": [prompt_bytes, *bytes_after],
        "seconds": spread(seconds[1:]),
        "share": share,
        "bars": [bar(f"time to compress a prompt of {options.prompt:,} tokens "
                     f"(T = {parse_policy(LONG).rounds}) over time of its prefill",
                     share, "<=", SHARE)],
    }  # fmt: skip


MEASURE = Measure("sampled", measure, FLAGS, model=DEFAULT)
CLAIMS = (
    claim("section 7, no figure: efficiency does not decline",
          "A token under reservoir sampling takes at most 1.05 times as long as under StreamingLLM",
          "sampled", below("token/ratio/reservoir", 1.05), unit="times"),
)  # fmt: skip


def times_table() -> str:
    """Time of a generated token over that of streaming of equal slots."""
    ratios = read("sampled")["results"]["token"]["ratio"]
    cells = ((f"`{name}`", ranged(ratios[name], "median", ".2f")) for name in CACHES)
    return table(("cache", "time per token over streaming's"), cells)


TABLES = {"sampled": times_table}

if __name__ == "__main__":
    run(MEASURE)
