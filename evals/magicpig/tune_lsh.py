"""Finds MagicPIG's K and L for a model and a text: the error of attention by the share of keys read
and by the bytes of the tables (arXiv 2410.16179, appendix F).

The last tokens of each stretch of text are the queries, both ends are exact. For each K, keys and
queries are hashed once, with planes for the largest L; smaller L use the first planes. Planes are
drawn again for every seed, stretch, layer and KV head. Bytes are those of the tables of one KV head
for --keys keys, also relative to its keys and values.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Spec
from jaxkv.evals.lib.run import DEFAULT, Measure, Run, flag, run
from jaxkv.evals.magicpig import heads
from jaxkv.evals.magicpig.heads import (
    QUERIES,
    SINKS,
    WINDOW,
    CapturedLayer,
    Estimate,
    attend,
    centred,
    errors,
    exact_attention,
    interval,
    last_queries,
    progress,
)
from jaxkv.policies import MagicPIG
from jaxkv.policies.magicpig import hash_tables, lsh
from jaxkv.policies.magicpig.lsh import Hashing
from jaxkv.policies.sparse_attention.base import Candidates
from jaxkv.policy_spec import format_policy

SIMHASH = "simhash"
BITS = tuple(range(4, 13))
COUNTS = (10, 20, 40, 75, 100, 150, 200, 300)
TARGET = 0.1


FLAGS = (
    *heads.FLAGS,
    flag("--seeds", 3, minimum=1),
    flag("--bits", BITS, "K to try", minimum=1),
    flag("--tables", COUNTS, "L to try", minimum=2),
    flag("--target", TARGET, "the largest acceptable error", minimum=1e-6),
    flag("--keys", type=int, about="hashed keys of which table bytes are computed (default: those "
         "of a stretch)", minimum=1),
)  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    """The errors of every K and L, and the recommended ones, which are printed."""
    options, name = run.options, run.llm.name
    options.bits, options.tables = sorted(set(options.bits)), sorted(set(options.tables))
    if options.quick:
        options.bits = options.bits[::2]
    for bits, tables in product(options.bits, options.tables):
        Hashing(bits, tables)  # raises UserError for an unknown one
    layers = heads.captured_layers(run, minimum=SINKS + 2 * WINDOW + QUERIES)
    model = of_model(run.llm.spec, layers, options, name)
    show(name, model, options.target)
    return {
        "stretches": options.stretches, "queries": QUERIES, "ends": [SINKS, WINDOW],
        "target": options.target, "models": {name: model},
    }  # fmt: skip


def policy_of(point: Mapping[str, Any]) -> str:
    """The policy string of a point."""
    return format_policy(MagicPIG(point["K"], point["L"], SINKS, WINDOW))


def of_model(
    spec: Spec, layers: Mapping[int, CapturedLayer], options: argparse.Namespace, name: str
) -> dict[str, Any]:
    """Every K and L, their Pareto frontier, and the recommended policy."""
    exact = {n: exact_attention(spec, layer, f"{name}, layer {n}") for n, layer in layers.items()}
    length = next(iter(layers.values())).k.shape[1]
    keys = options.keys or length - QUERIES - SINKS - WINDOW
    cache = 2 * spec.head_dim * jnp.dtype(spec.dtype).itemsize * keys
    points = []
    for bits in progress(options.bits, f"{name}, K"):
        how, estimates = Hashing(bits, options.tables[-1]), []
        for n, layer in layers.items():
            for seed in range(options.seeds):
                every = by_tables(spec, layer, how, tuple(options.tables), options.seeds * n + seed)
                estimates.append(
                    [(errors(attended.out, exact[n]), attended.share) for attended in every]
                )
        for i, tables in enumerate(options.tables):
            size = hash_tables.nbytes(keys, bits, tables)
            points.append({
                "K": bits, "L": tables,
                "share": np.mean([by_tables[i][1] for by_tables in estimates]),
                "error": interval(np.array([by_tables[i][0] for by_tables in estimates])),
                "table_bytes": size, "of_cache": size / cache,
            })  # fmt: skip
    best = smallest_tables(points, options.target)
    return {
        "tokens": length, "layers": list(layers), "keys": keys, "cache_bytes": cache,
        "points": points, "frontier": {SIMHASH: frontier(points)}, "least": {SIMHASH: best},
        "policy": policy_of(best) if best else None,
    }  # fmt: skip


@partial(jax.jit, static_argnums=(0, 2, 3))
def by_tables(
    spec: Spec, layer: CapturedLayer, how: Hashing, tables: tuple[int, ...], seed: jax.Array | int
) -> list[Estimate]:
    """Attention with each of these L in ascending order, using the first planes of `how`."""
    scores = last_queries(spec, layer, SINKS, WINDOW, seed)
    keys, cosines = centred(spec, layer, SINKS, WINDOW)
    estimates = []
    for count, agreeing in zip(tables, agreements(scores, keys, how, tables), strict=True):
        weights = replace(how, tables=count)(cosines)
        attended = scores.selectable & (agreeing >= 2)
        estimates.append(attend(scores, jnp.where(attended, weights, -jnp.inf), layer.v))
    return estimates


def agreements(
    scores: Candidates, keys: jax.Array, how: Hashing, tables: tuple[int, ...]
) -> list[jax.Array]:
    """For each L, the number of the first L tables in which query and key have equal codes
    [B,K,G,Q,T]."""
    rows, kv_heads, group, queries, length = scores.logits.shape
    head_dim = keys.shape[-1]
    q = scores.q.reshape(rows, queries, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)

    def count_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        key, q, k = (a[None] for a in head)
        planes = lsh.planes(key[None], head_dim, how)[0]
        of_q, of_k = (lsh.codes(a, planes, how)[0] for a in (q, k))  # [L,*]

        def add(table: jax.Array, count: jax.Array) -> jax.Array:
            return count + (of_q[table][:, None] == of_k[table][None]).astype(jnp.int32)

        count, counts = jnp.zeros((q.shape[1], length), jnp.int32), []
        for first, last in zip((0, *tables), tables, strict=False):
            count = jax.lax.fori_loop(first, last, add, count)
            counts.append(count)
        return tuple(counts)

    # One head at a time, to limit memory.
    heads = scores.rng, q.reshape(rows, kv_heads, -1, head_dim), keys
    counts = jax.lax.map(count_head, tuple(a.reshape(-1, *a.shape[2:]) for a in heads))
    return [count.reshape(scores.logits.shape) for count in counts]


def frontier(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The Pareto frontier of share read and error, by share."""
    best, pareto = float("inf"), []
    for point in sorted(points, key=lambda p: (p["share"], p["error"]["mean"])):
        if point["error"]["mean"] < best:
            best = point["error"]["mean"]
            pareto.append({name: point[name] for name in ("K", "L", "share", "of_cache")}
                          | {"error": best})  # fmt: skip
    return pareto


def smallest_tables(points: Sequence[Mapping[str, Any]], target: float) -> Mapping[str, Any] | None:
    """The point with the smallest tables, then the smallest share, among those whose error plus two
    standard errors is at most `target`."""
    will_do = [p for p in points if p["error"]["mean"] + 2 * p["error"]["standard_error"] <= target]
    return min(will_do, key=lambda p: (p["table_bytes"], p["share"]), default=None)


def show(name: str, model: Mapping[str, Any], target: float) -> None:
    """Print the frontier and the recommended policy."""
    print(f"{name}: share read, error of attention, and tables over keys and values")
    print(f"{'':14}{'K':>4}{'L':>6}{'read':>10}{'error':>10}{'tables':>10}")
    for kind, line in model["frontier"].items():
        for p in line:
            print(f"{kind:14}{p['K']:4}{p['L']:6}{p['share']:10.2%}{p['error']:10.4f}"
                  f"{p['of_cache']:10.2f}")  # fmt: skip
    for kind, best in model["least"].items():
        if best is None:
            print(f"{kind}: no error is below {target:g}; try more --tables or fewer --bits")
        else:
            mean, size = best["error"]["mean"], best["table_bytes"]
            print(f"{kind}: the smallest tables with an error of {target:g} are of K={best['K']}, "
                  f"L={best['L']}: {best['share']:.2%} read, an error of {mean:.4f}, "
                  f"{size:,} bytes a kv head")  # fmt: skip
    if model["policy"]:
        print("use", model["policy"])


MEASURE = Measure("tune_lsh", measure, FLAGS, model=DEFAULT)


if __name__ == "__main__":
    run(MEASURE)
