"""The error of attention under sampled caches, by the exponent of the weights, on a real model.

Keys, values and queries of some layers are captured from the beginnings of texts. Each policy reads
them with absolute positions, and its output is compared with exact causal attention. The error is
relative to the norm of exact attention, and its mean is over the queries after the first 512 tokens
and over heads. Intervals are over texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.contract import Chunk, Policy, Spec
from jaxkv.evals.balancekv.single_layer import capture
from jaxkv.evals.lib.record import Record, read, run_command, standard_error
from jaxkv.evals.lib.table import page_table, table_head, table_row
from jaxkv.evals.lib.text import ask_for_texts, tokens_of
from jaxkv.evals.lib.verdict import Statement, below
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


def main() -> None:
    parser = ask_for_texts("jaxkv.evals.reservoir.attention_error", __doc__)
    parser.add_argument("--tokens", type=int, default=2_048, help="read of each text")
    parser.add_argument("--layers", type=int, nargs="+", help="default: every third")
    parser.add_argument("--seeds", type=int, default=3, help="of the samples")
    options = parser.parse_args()
    if options.tokens <= SKIP:
        parser.error(f"--tokens must be above {SKIP}, got {options.tokens}")
    llm = models.load(options.model, "float32")
    texts = {path.stem: tokens_of(llm, path, options.tokens)[0] for path in options.texts}
    layers = sorted(set(options.layers or range(0, llm.config.layers, 3)))
    if not 0 <= layers[0] <= layers[-1] < llm.config.layers:
        parser.error(f"--layers must be from 0 to {llm.config.layers - 1}, got {options.layers}")
    seeds = list(range(options.seeds))
    record = Record("attention_error", [*llm.files, *options.texts], seeds, quick=options.quick)
    record.finish(run(llm, texts, layers, seeds, policies()))


def policies() -> dict[str, Policy]:
    """Streaming, and every sampled cache with every exponent."""
    return {"streaming": STREAMING} | {
        f"{name}, {exponent:g}": dataclasses.replace(policy, exponent=exponent)
        for name, policy in SAMPLED.items()
        for exponent in EXPONENTS
    }


def run(
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
    exact = uncached.attend(None, spec, None, q, k, v, implementation="xla")[0][:, SKIP:]

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


def table() -> str:
    """The error by weight of a token that represents n, with two standard errors over texts."""
    rows = read("attention_error")["results"]["rows"]

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['error']:.3f} ± {2 * row['standard_error']:.3f}"

    lines = table_head("cache", "1", "n^0.25", "n^0.5", "n")
    lines.append(table_row("`streaming`", cell(rows["streaming"]), *3 * [""]))
    for name in SAMPLED:
        cells = (cell(rows[f"{name}, {exponent:g}"]) for exponent in EXPONENTS)
        lines.append(table_row(f"`{name}`", *cells))
    return page_table(lines)


TABLES = {"attention_error": table}
STATEMENTS = tuple(
    Statement(page, "lower the error of attention", "attention_error",
              [below(f"rows/{name}, {exponent}/by_text", f"rows/{name}, 0/by_text")
               for name in SAMPLED for exponent in ("0.25", "0.5", "1")])
    for page in ("docs/results/reservoir.md", "evals/NEGATIVE.md")
)  # fmt: skip

if __name__ == "__main__":
    run_command(main)
