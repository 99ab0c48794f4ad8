"""Cost and loss of sampled caches, compared with StreamingLLM.

Three experiments, by their names for --only:
  "worth"     an endless stream of books through every cache at equal bytes: loss per block, memory
  "token"     time per token over that of `streaming` at equal slots, with all halving included
  "compression"  compressing a long prompt, against prefill (a Llama of 110 million random weights)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.baseline import LARGE, SMALL, random_llama
from jaxkv.evals.lib.record import Record, spread, standard_error
from jaxkv.evals.lib.state_sizes import streaming, streaming_window
from jaxkv.evals.lib.text import HELD_BACK, tokens_of
from jaxkv.evals.lib.timing import bar, decode_variant, prompt, ratio, time_rounds
from jaxkv.evals.streaming.endless import read
from jaxkv.models.compilation import clock
from jaxkv.models.llm import Llm
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
CHUNK = 200  # tokens per chunk of a stream
WORSE, DEARER, SHARE, GROWN = 1.01, 1.3, 0.1, 16  # upper bars; GROWN in MiB


def main() -> None:
    ask = argparse.ArgumentParser(
        prog="python -m jaxkv.evals.reservoir.sampled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ask.add_argument("--texts", required=True, type=Path, help="a folder with manifest.json")
    ask.add_argument("--tokens", type=int, default=1_000_000, help="scored tokens")
    ask.add_argument("--block", type=int, default=100_000, help="tokens per reported loss")
    ask.add_argument("--written", type=int, default=10_000, help="timed tokens")
    ask.add_argument("--prompt", type=int, default=32_768, help="length of the compressed prompt")
    ask.add_argument("--rounds", type=int, default=7, help="rounds per measurement")
    ask.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    ask.add_argument("--quick", action="store_true", help="small sizes, into out/")
    given = ask.parse_args()
    if given.block % CHUNK or given.tokens % given.block:
        ask.error(f"blocks must be whole numbers of {CHUNK} tokens, and tokens of blocks")

    llm = models.load()
    ids, files = tokens_of(llm, given.texts, given.tokens + 1, HELD_BACK)
    if len(ids) <= given.tokens:
        ask.error(f"{given.texts} holds only {len(ids):,} tokens; add texts or ask for fewer")
    quick = given.quick or set(given.only) != set(PARTS)  # a part is not the record
    record = Record("sampled", [*llm.files, *files], [0], quick)
    results: dict[str, Any] = {"bars": []}
    for part in given.only:
        results[part] = PARTS[part](llm, ids, given)
        results["bars"] += results[part].pop("bars")
    record.finish(results)


def worth(llm: Llm, ids: Sequence[int], given: argparse.Namespace) -> dict[str, Any]:
    """The loss of each block of one text, by cache."""
    caches = {"streaming": streaming(streaming_window(llm, CACHES.values())), **CACHES}
    found: dict[str, Any] = {
        "tokens": given.tokens, "block": given.block, "chunk": CHUNK, "caches": {}
    }  # fmt: skip
    for name, text in caches.items():
        blocks = read(llm, ids, text, CHUNK, given.block, 0, name)
        later = [block["resident_bytes"] for block in blocks[1:]] or [blocks[0]["resident_bytes"]]
        found["caches"][name] = {
            "policy": text,
            "blocks": [finite(block["loss"]) for block in blocks],
            "not_finite": sum(block["not_finite"] for block in blocks),
            "state_bytes": sorted({block["state_bytes"] for block in blocks}),
            "grown_bytes": later[-1] - later[0],
            "tokens_per_second": given.tokens / sum(block["seconds"] for block in blocks),
        }
    base = found["caches"]["streaming"]["blocks"]
    for line in found["caches"].values():
        line["over_streaming"] = over(line["blocks"], base)
    found["bars"] = [
        bar(f"{name}: loss of {given.tokens:,} tokens over that of {caches['streaming']}",
            1 + found["caches"][name]["over_streaming"]["mean"], "<=", WORSE)
        for name in ("reservoir", "balance-stream")
        if found["caches"][name]["over_streaming"]
    ]  # fmt: skip
    every = found["caches"].values()
    found["bars"] += [
        bar("losses that are not finite", sum(x["not_finite"] for x in every), "<=", 0),
        bar("sizes of one state, the maximum over caches",
            max(len(x["state_bytes"]) for x in every), "<=", 1),
        bar("MiB by which the process grew after the first block, the maximum over caches",
            max(x["grown_bytes"] for x in every) / 2**20, "<=", GROWN),
    ]  # fmt: skip
    return found


def finite(loss: float) -> float | None:
    return loss if np.isfinite(loss) else None


def over(blocks: list[float | None], base: list[float | None]) -> dict[str, float] | None:
    """Relative difference of the losses by block: mean and standard error."""
    if None in blocks or None in base:
        return None
    share = np.array(blocks) / np.array(base) - 1
    return {"mean": share.mean(), "standard_error": standard_error(share)}


def token(llm: Llm, ids: Sequence[int], given: argparse.Namespace) -> dict[str, Any]:
    """Seconds per generated token; the caches alternate."""
    caches = {"streaming": STREAMING, **CACHES}
    variants = {}
    for name, text in caches.items():
        stream = models.Stream(llm, text)
        stream.prefill([prompt(llm, 8 * SLOTS)])
        variants[name] = decode_variant(stream, given.written)
    seconds = time_rounds(variants, given.rounds, f"{given.written:,} tokens")
    ratios = {name: ratio(seconds[name], seconds["streaming"]) for name in CACHES}
    return {
        "slots": SLOTS,
        "tokens": given.written,
        "microseconds": {n: spread(1e6 / given.written * np.array(s)) for n, s in seconds.items()},
        "ratio": ratios,
        "bars": [bar("a token of balance-stream over one of streaming, equal slots",
                     ratios["balance-stream"], "<=", DEARER)],
    }  # fmt: skip


def time_compression(llm: Llm, ids: Sequence[int], given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of prompt compression and of prefill."""
    large, _ = random_llama(SMALL if given.quick else LARGE)
    tokens = prompt(large, given.prompt)
    clock()
    stream = models.Stream(large, LONG, tokens=given.prompt)
    begun, compiled = perf_counter(), clock().seconds
    stream.prefill([tokens])
    jax.block_until_ready(stream.decoding)
    reading = perf_counter() - begun - (clock().seconds - compiled)

    read_whole, whole = jax.tree.map(jnp.copy, stream.decoding), stream.state_bytes
    seconds, left = [], set()
    for _ in range(given.rounds + 1):  # the first compiles
        stream.decoding, stream.prefill_finished = jax.tree.map(jnp.copy, read_whole), False
        jax.block_until_ready(stream.decoding)
        begun = perf_counter()
        stream.finish_prefill()
        jax.block_until_ready(stream.decoding)
        seconds.append(perf_counter() - begun)
        left.add(stream.state_bytes)
    share = spread(np.array(seconds[1:]) / reading)
    return {
        "policy": LONG,
        "prompt": given.prompt,
        "reading_seconds": reading,  # once
        "state_bytes": [whole, *left],
        "seconds": spread(seconds[1:]),
        "share": share,
        "bars": [bar(f"time to compress a prompt of {given.prompt:,} tokens "
                     f"(T = {parse_policy(LONG).rounds}) over time of its prefill",
                     share, "<=", SHARE)],
    }  # fmt: skip


PARTS = {"worth": worth, "token": token, "compression": time_compression}


if __name__ == "__main__":
    main()
