"""Decoding speed: after a million tokens, and against re-computation.

Every result is a ratio of variants that alternate in one process. Two experiments:
  seen      time per token after 1 K, 32 K and 1 M tokens in one cache
  recompute streaming against a sliding window with re-computation (the paper's Figure 10)
`benchmarks/rates.py` compares decoding and prefill with transformers, and with the bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.baseline import LARGE, SMALL, Baseline, random_llama, thread_variants
from jaxkv.evals.lib.measured_on import RANDOM, STORIES
from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.state_sizes import streaming
from jaxkv.evals.lib.timing import (
    bar,
    decode_after_prompt,
    decode_variant,
    fastest,
    generate_greedy,
    prompt,
    ratio,
    time_rounds,
    timed,
)
from jaxkv.evals.lib.verdict import above, below, claim
from jaxkv.models.generation.decoding import BLOCK
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import uncached
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Weights
from jaxkv.typing import Array, Int32

POLICY = "streaming:sinks=4,window=252"
TOKENS = 4 * BLOCK  # of one call with the small model, so that the loop dominates


@dataclass(frozen=True)
class Scale:
    """The sizes of a run: those of the claims, or quick ones."""

    shape: dict[str, int]
    seen: tuple[int, ...]
    caches: tuple[int, ...]
    rounds: int
    slow_rounds: int  # rounds of slow variants


FULL = Scale(LARGE, (1_000, 32_000, 1_000_000), (256, 512, 1024, 2048, 4096), 15, 5)
QUICK = Scale(SMALL, (1_000, 4_000, 16_000), (256, 512), 3, 2)


def measure(run: Run) -> dict[str, Any]:
    """Both experiments, with their bars."""
    scale = QUICK if run.options.quick else FULL
    small, large = models.load(run.options.model), random_llama(scale.shape)
    results: dict[str, Any] = {"shape": scale.shape, "bars": []}
    for name, part in PARTS.items():
        results[name] = part(small, large, scale)
        results["bars"] += results[name].pop("bars", [])
    return results


Pair = tuple[Llm, Baseline]


def seen(llm: Llm, large: Pair, scale: Scale) -> dict[str, Any]:
    """Time per token by the number of tokens that the cache has seen."""
    variants = {}
    for count in scale.seen:
        stream = models.Stream(llm, POLICY)
        stream.prefill([prompt(llm, 16)])
        generate_greedy(stream, count - 16)
        variants[str(count)] = decode_variant(stream, TOKENS)
    seconds = time_rounds(variants, scale.rounds, "seen")
    first, *later = seconds
    ratios = {name: ratio(seconds[name], seconds[first]) for name in later}
    return {
        "microseconds_per_token": {
            name: spread(1e6 / TOKENS * np.array(taken)) for name, taken in seconds.items()
        },
        "ratio": ratios,
        "bars": [bar(f"260K: time per token after {int(name):,} tokens over that after 1,000",
                     ratios[name], "<=", 1.05) for name in later],
    }  # fmt: skip


def recompute(small: Llm, large: Pair, scale: Scale) -> dict[str, Any]:
    """Figure 10: a token with the cache, and a token with a new forward pass over the window.

    The baseline is the faster forward pass of jaxkv and transformers.
    """
    (llm, baseline), new, table = large, 8, []
    for cache in scale.caches:
        ids = prompt(llm, cache)
        variants = {
            "streaming": decode_after_prompt(llm, streaming(cache - 4), cache + 64, new),
            "jaxkv": timed(partial(forward, llm, ids)),
            **thread_variants("transformers", partial(baseline.prefill, ids)),
        }
        seconds = time_rounds(variants, scale.slow_rounds, f"recompute, cache {cache}")
        seconds["streaming"] = [taken / new for taken in seconds["streaming"]]
        best = fastest(seconds, "jaxkv", "transformers")
        line = {name: spread(1e3 * np.array(taken)) for name, taken in seconds.items()}
        table.append(
            {
                "cache": cache,
                "milliseconds": line | {"recompute": line[best]},
                "recomputed_by": best,
                "times_faster": ratio(seconds[best], seconds["streaming"]),
            }
        )
    return {"table": table, "most": max(row["times_faster"]["median"] for row in table)}


@partial(jax.jit, static_argnums=0)
def fresh(config: Config, weights: Weights, ids: Int32[Array, "1 T"]) -> Array:
    """One forward pass over all tokens, up to the logits of the next token."""
    decoder, hidden, _ = uncached.forward(config, weights, ids)
    return decoder.logits(hidden[:, -1:])


def forward(llm: Llm, ids: list[int]) -> None:
    fresh(llm.config, llm.weights, jnp.asarray([ids], jnp.int32)).block_until_ready()


PARTS: dict[str, Callable[[Llm, Pair, Scale], dict[str, Any]]] = {
    "seen": seen,
    "recompute": recompute,
}

CLAIMS = (
    claim("Figure 10: Llama-2 7B and 13B, caches of 256 to 4096, one A6000",
          "With a cache of 4,096 tokens, a token is over 22.2 times as fast as with "
          "re-computation of a sliding window",
          "latency", above("recompute/most", 22.2), unit="times", model=f"{RANDOM} (110M)"),
    claim("section 1: constant memory and time",
          "A token after 1,000,000 others takes at most 1.05 times one after 1,000 (medians)",
          "latency", below("seen/ratio/1000000", 1.05, sure=False), unit="times", model=STORIES),
)  # fmt: skip


MEASURE = Measure(
    "latency", measure,
    [flag("--model", type=Path, required=True, about="the folder of stories260K")],
    data=lambda options: [options.model / "model.safetensors"],
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
