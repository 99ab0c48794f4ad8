"""The error of attention under sampled caches, by the exponent of the weights, on a real model.

Keys, values and queries of some layers are captured from the beginnings of texts. Each policy reads
them with absolute positions, and its output is compared with exact causal attention. The error is
relative to the norm of exact attention, and its mean is over the queries after the first 512 tokens
and over heads. Intervals are over texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Chunk, Policy, Spec
from jaxkv.errors import UserError
from jaxkv.evals.lib.record import read, standard_error
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.text import beginnings
from jaxkv.evals.lib.verdict import Statement, below
from jaxkv.evals.magicpig.heads import capture
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import uncached
from jaxkv.policies.merge_reduce.balance_stream import BalanceStream
from jaxkv.policies.merge_reduce.stratified import Stratified
from jaxkv.policies.reservoir import Reservoir
from jaxkv.policies.streaming import Streaming
from jaxkv.typing import Array

EXPONENTS = (0.0, 0.25, 0.5, 1.0)  # 0: a sampled token counts once
ENDS = {"sinks": 4, "window": 124, "positions": "absolute"}
SAMPLED = {
    "reservoir": Reservoir(sample=128, weighted=True, **ENDS),
    "stratified": Stratified(sample=128, weighted=True, **ENDS),
    "balance-stream": BalanceStream(levels=3, block=64, weighted=True, **ENDS),
}
STREAMING = Streaming(sinks=4, window=252, positions="absolute")
SKIP = 512


FLAGS = (
    flag("--tokens", 2_048, "read of each text", minimum=SKIP + 1),
    flag("--layers", None, "default: every third", type=int, nargs="+"),
    flag("--seeds", 3, "of the samples", minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """The errors of every cache in some layers."""
    llm, options = run.llm, run.options
    texts = beginnings(llm, options.texts, options.tokens)
    layers = layers_of(llm, options.layers or range(0, llm.config.layers, 3))
    return all_errors(llm, texts, layers, range(options.seeds), policies())


def layers_of(llm: Llm, numbers: Iterable[int]) -> list[int]:
    """The numbers of --layers in ascending order.

    Raises UserError where the model has no such layer.
    """
    layers, last = sorted(set(numbers)), llm.config.layers - 1
    if not 0 <= layers[0] <= layers[-1] <= last:
        raise UserError(f"--layers must be from 0 to {last}, got {layers}; give others")
    return layers


def policies() -> dict[str, Policy]:
    """Streaming, and every sampled cache with every exponent."""
    return {"streaming": STREAMING} | {
        f"{name}, {exponent:g}": dataclasses.replace(policy, exponent=exponent)
        for name, policy in SAMPLED.items()
        for exponent in EXPONENTS
    }


def all_errors(
    llm: Llm,
    texts: Mapping[str, Sequence[int]],
    layers: Sequence[int],
    seeds: Sequence[int],
    caches: Mapping[str, Policy],
) -> dict[str, Any]:
    """By cache, the error of each text and layer, its mean and its interval."""
    by_text = []
    for text, ids in texts.items():
        captured = capture(llm, ids)
        by_text.append([errors(llm.spec, *captured[layer], seeds, caches) for layer in layers])
        print(f"{text}: {len(layers)} layers", flush=True)
    rows = {}
    for name in by_text[0][0]:
        cache_errors = np.array([[by_cache[name] for by_cache in by_layer] for by_layer in by_text])
        rows[name] = {
            "error": np.mean(cache_errors),
            "standard_error": standard_error(np.mean(cache_errors, axis=1)),
            "by_text": np.mean(cache_errors, axis=1).tolist(),
            "by_layer": np.mean(cache_errors, axis=0).tolist(),
        }
    return {
        "model": llm.name,
        "texts": {text: len(ids) for text, ids in texts.items()},
        "layers": list(layers),
        "rows": rows,
    }


def errors(
    spec: Spec,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seeds: Sequence[int],
    caches: Mapping[str, Policy],
) -> dict[str, float]:
    """The mean relative error of every cache on one layer's q, k, v [T,*,H]."""
    q, k, v = (jnp.asarray(a)[None] for a in (q, k, v))
    exact = uncached.attend(None, spec, q, k, v, implementation="xla")[0][:, SKIP:]

    def error(policy: Policy, seed: int) -> float:
        apart = jnp.linalg.norm(attend(policy, spec, q, k, v, seed)[:, SKIP:] - exact, axis=-1)
        return float(jnp.mean(apart / jnp.linalg.norm(exact, axis=-1)))

    def draws(policy: Policy) -> Sequence[int]:
        return seeds[:1] if isinstance(policy, Streaming) else seeds

    return {
        name: float(np.mean([error(policy, seed) for seed in draws(policy)]))
        for name, policy in caches.items()
    }


@partial(jax.jit, static_argnums=(0, 1))
def attend(policy: Policy, spec: Spec, q: Array, k: Array, v: Array, seed: int) -> Array:
    """The output of a policy that reads all tokens."""
    positions = jnp.arange(q.shape[1], dtype=jnp.uint32)[None]
    chunk = Chunk(q, k, v, positions, jnp.ones(positions.shape, bool))
    return policy.update(spec, policy.init(spec, 1, jax.random.key(seed)), chunk)[0].out


def errors_table() -> str:
    """The error by weight of a token that represents n, with two standard errors over texts."""
    rows = {
        name: f"{row['error']:.3f} ± {2 * row['standard_error']:.3f}"
        for name, row in read("attention_error")["results"]["rows"].items()
    }
    cells = [("`streaming`", rows["streaming"], *3 * [""])] + [
        (f"`{name}`", *(rows[f"{name}, {exponent:g}"] for exponent in EXPONENTS))
        for name in SAMPLED
    ]
    return table(("cache", "1", "n^0.25", "n^0.5", "n"), cells)


MEASURE = Measure("attention_error", measure, FLAGS, model=SMOLLM2, texts=1)
TABLES = {"attention_error": errors_table}
STATEMENTS = tuple(
    Statement(page, "lower the error of attention", "attention_error",
              [below(f"rows/{name}, {exponent}/by_text", f"rows/{name}, 0/by_text")
               for name in SAMPLED for exponent in ("0.25", "0.5", "1")])
    for page in ("docs/results/reservoir.md", "evals/NEGATIVE.md")
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
