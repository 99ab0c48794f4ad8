"""MagicPIG's premises at small scale: the error of attention to a share of the keys, by selection
(arXiv 2410.16179, Figures 2 to 5 and 8a, Tables 7 and 8, appendices B, D and G).

Models read stretches of text within their trained context; the last tokens of each are the queries.
`captured`: both ends are exact, and a share of the keys between is selected by the methods of
evals/magicpig/matched_budgets.py. K and L of a layer are chosen so that the mean inclusion
probability of its keys is that share. The share that was read is measured: Quest takes whole pages,
and oracle draws may select a key more than once. `budgets`: all keys but the query's own may be
selected, and each oracle draw counts. `drawn`: synthetic attention over 16,384 keys
(evals/magicpig/synthetic.py), also with tables as published. Errors are divided by the norm of
exact attention and averaged over query heads; intervals are over the stretches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, Spec
from jaxkv.evals.lib.measured_on import REAL, SYNTHETIC
from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import DEFAULT, Measure, Run, flag, run
from jaxkv.evals.lib.verdict import (
    Derived,
    Results,
    above,
    below,
    claim,
    decisions,
    within,
)
from jaxkv.evals.magicpig import heads, inclusion, matched_budgets, synthetic
from jaxkv.evals.magicpig.geometry import geometry, long_tail
from jaxkv.evals.magicpig.heads import (
    QUERIES,
    SINKS,
    WINDOW,
    CapturedLayer,
    errors,
    estimate,
    exact_attention,
    interval,
    progress,
)
from jaxkv.evals.magicpig.published_tables import DIMS, TABLE_7, table_7, table_8, zoo
from jaxkv.policies import Oracle, TopK
from jaxkv.policies.magicpig import lsh
from jaxkv.policies.magicpig.lsh import Hashing

Histogram = TypeVar("Histogram", matched_budgets.CosineHistogram, matched_budgets.Masses)
SHARES = (0.02, 0.05, 0.1, 0.2)
BUDGETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.75, 0.9)
SIGMAS = (1.0, 1.5, 2.0)
DRAWINGS = 20  # samples of synthetic attention
UNCENTRED = "magicpig, uncentred"
COUNTED = ((8, 75), (9, 120), (10, 150))  # K and L whose shares are counted on random keys
KEYS, ASKING = 20_000, 64  # number of these keys, and of queries


def measure(run: Run) -> dict[str, Any]:
    """Everything of a model, tables by formula, and synthetic attention."""
    options = smaller(run.options)
    layers = heads.captured_layers(run, minimum=SINKS + 2 * WINDOW + QUERIES)
    return {
        "stretches": options.stretches, "queries": QUERIES, "ends": [SINKS, WINDOW],
        "tables": tables(range(options.seeds)),
        "drawn": {
            f"{sigma:g}": synthetic.by_budget(sigma, options.budgets, range(options.drawings))
            for sigma in SIGMAS
        },
        "models": {run.llm.name: of_model(run.llm.spec, layers, options, run.llm.name)},
    }  # fmt: skip


def smaller(options: argparse.Namespace) -> argparse.Namespace:
    """The options with all sizes; smaller ones if --quick is given."""
    options.shares, options.budgets, options.drawings = SHARES, BUDGETS, DRAWINGS
    if options.quick:
        options.shares, options.budgets, options.drawings = SHARES[::2], BUDGETS[2::2], 4
    return options


def of_model(
    spec: Spec, layers: Mapping[int, CapturedLayer], options: argparse.Namespace, name: str
) -> dict[str, Any]:
    exact = {n: exact_attention(spec, layer, f"{name}, layer {n}") for n, layer in layers.items()}
    alike = lambda policy: dict.fromkeys(layers, policy)
    budgets: dict[str, Any] = {"topk": {}, "oracle": {}}
    for share in progress(options.budgets, f"{name}, by budget"):
        for kind, make in (("topk", TopK), ("oracle", Oracle)):
            policies = alike(make(share, sinks=0, window=1))
            budgets[kind][f"{share:g}"] = measured(spec, layers, exact, policies, options.seeds)
    captured: dict[str, Any] = {}
    hashed: dict[str, Any] = {}
    angles = {n: of_stretches(matched_budgets.angles, spec, x) for n, x in layers.items()}
    masses = {n: of_stretches(matched_budgets.masses, spec, x) for n, x in layers.items()}
    for share in progress(options.shares, f"{name}, by share"):
        pairs = {n: matched_budgets.tables(angles[n], share) for n in layers}
        hashed[f"{share:g}"] = pairs
        policies_by_layer = {
            n: matched_budgets.methods(share, pair, SINKS, WINDOW, masses[n].reaching(share))
            for n, pair in pairs.items()
        }
        by_kind = {
            kind: {n: policies_by_layer[n][kind] for n in layers}
            for kind in next(iter(policies_by_layer.values()))
        }
        by_kind[UNCENTRED] = {n: replace(p, center=False) for n, p in by_kind["magicpig"].items()}
        for kind, policies in by_kind.items():
            line = measured(spec, layers, exact, policies, options.seeds)
            captured.setdefault(kind, {})[f"{share:g}"] = line
    add_ratios_to_topk(captured)
    return {
        "tokens": next(iter(layers.values())).k.shape[1], "layers": list(layers),
        "hashed": hashed, "captured": captured,
        "budgets": budgets | {"crossing": synthetic.crossing(budgets)},
        "long_tail": {n: long_tail(spec, layer, name) for n, layer in layers.items()},
        "geometry": {n: geometry(spec, layer, name) for n, layer in layers.items()},
    }  # fmt: skip


def of_stretches(measure: Callable[..., Histogram], spec: Spec, layer: CapturedLayer) -> Histogram:
    """`matched_budgets.angles` or `masses` of the last queries with the keys between the ends."""
    stretches = [[row] for row in zip(*map(np.asarray, layer), strict=True)]
    return measure(spec, stretches, layer.k.shape[1] - QUERIES, SINKS, WINDOW)


def measured(
    spec: Spec, layers: Mapping[int, CapturedLayer], exact: Mapping[int, jax.Array],
    policies: Mapping[int, Policy], seeds: int,
) -> dict[str, Any]:  # fmt: skip
    """Errors and the share of the keys that was read, with one policy per layer."""
    by_layer_and_seed, read = [], []
    for n, layer in layers.items():
        # Every layer has its own seeds, and every stretch its own draws.
        estimates = [estimate(policies[n], spec, layer, seeds * n + seed) for seed in range(seeds)]
        by_layer_and_seed.append([errors(attended.out, exact[n]) for attended in estimates])
        read.append([np.asarray(attended.share, np.float64) for attended in estimates])
    of_all = np.array(by_layer_and_seed)  # [layers,seeds,B]
    by_layer = {
        n: {"error": interval(of_all[i]), "share": np.mean(read[i])} for i, n in enumerate(layers)
    }
    return {
        "share": np.mean(read),
        "error": spread(of_all.reshape(-1)) | interval(of_all),
        "stretches": of_all.mean(axis=(0, 1)).tolist(),
        "layers": by_layer,
    }


def add_ratios_to_topk(captured: dict[str, Any]) -> None:
    """Add each method's error over top-k's at the same share, by stretch."""
    for by_share in captured.values():
        for share, line in by_share.items():
            over = np.array(line["stretches"]) / np.array(captured["topk"][share]["stretches"])
            line["over_topk"] = interval(over)


def tables(seeds: Sequence[int]) -> dict[str, Any]:
    """The published tables by formula, and shares that are counted on random keys."""
    seven = [
        {"model": model, "K": K, "L": L, "thousand_tokens": n,
         "published": dict(zip(("projector_kb", "table_gib", "computation_percent"), row,
                             strict=True)), **table_7(model, K, L, n)}
        for (model, K, L, n), row in TABLE_7.items()
    ]  # fmt: skip
    counted = [
        {"K": K, "L": L, "share": spread([counted_share(Hashing(K, L), seed) for seed in seeds]),
         "isotropic": inclusion.isotropic(K, L, DIMS)}
        for K, L in progress(COUNTED, "counting what tables find")
    ]  # fmt: skip
    return {"table_7": seven, "table_8": table_8(), "table_8_counted": counted, "zoo": zoo()}


def counted_share(how: Hashing, seed: int) -> float:
    """The share of keys of random direction in 88 dimensions that have a query's code in enough
    tables; mean over queries."""
    plane_key, query_key, third = jax.random.split(jax.random.key(seed), 3)
    planes = lsh.planes(jax.random.bits(plane_key, (1, 1, 2), jnp.uint32), DIMS, how)[0]
    q = lsh.codes(jax.random.normal(query_key, (1, ASKING, DIMS)), planes, how)[0]
    keys_by_block = jax.random.normal(third, (KEYS // 1000, 1, 1000, DIMS))

    def share(k: jax.Array) -> jax.Array:
        codes = lsh.codes(k, planes, how)[0]
        agreeing = jax.lax.map(lambda code: jnp.sum(codes == code[:, None], axis=0), q.T)
        return jnp.mean((agreeing >= 2).astype(jnp.float32))

    return float(jnp.mean(jax.lax.map(share, keys_by_block)))


FLAGS = (*heads.FLAGS, flag("--seeds", 3, minimum=1))
MEASURE = Measure("sampling", measure, FLAGS, model=DEFAULT)
SINK = 0.3  # share of the attention; a layer whose first token gets more has a sink


def error_path(
    method: str, share: str = "{share}", part: str = "captured", layer: str = "{layer}"
) -> str:
    """The path of a method's error in a layer."""
    return f"models/{{model}}/{part}/{method}/{share}/layers/{layer}/error"


def lower_than_topk(method: str, part: str = "captured", share: str = "{share}") -> Derived:
    """The share of layers and budgets in which a method's error is surely below top-k's."""
    lower = below(error_path(method, share, part), error_path("topk", share, part))
    return lambda results: {part: mean(case.holds for case in decisions(lower, results))}


def over_best(results: Results) -> dict[str, float]:
    """The error of magicpig minus the lowest error of another method."""
    cases = {}
    for model in results["models"].values():
        for share, line in model["captured"]["magicpig"].items():
            for layer, measures in line["layers"].items():
                errors = [
                    method[share]["layers"][layer]["error"]["mean"]
                    for kind, method in model["captured"].items()
                    if kind != "magicpig"
                ]
                cases[f"{share}, layer {layer}"] = measures["error"]["mean"] - min(errors)
    return cases


def crossings(results: Results) -> dict[str, float]:
    """The budget from which top-k has the lower error; 1 if there is none."""
    return {f"deviation {name}": case["crossing"] or 1.0 for name, case in results["drawn"].items()}


def topk_errors(results: Results) -> dict[str, float]:
    """The error of the top fifth of the keys where it has 70 to 80 % of the weight."""
    return {
        f"deviation {name}": case["topk"]["0.2"]["error"]["median"]
        for name, case in results["drawn"].items()
        if 0.7 <= case["mass_of_top_fifth"] <= 0.8
    }


def in_sink_layers(name: str) -> Derived:
    """A measure of the geometry of each layer that has a sink."""

    def cases(results: Results) -> dict[str, Any]:
        first = results["beside"]["first_token"]["by_layer"]
        return {
            f"layer {layer}": measures[name]
            for model in results["models"].values()
            for layer, measures in model["geometry"].items()
            if first[int(layer)] > SINK
        }

    return cases


def deviations(results: Results) -> dict[str, float]:
    """The deviation of the log distance of values from the output, over that of logits."""
    return {
        f"layer {layer}": measures["deviations"]["log |v - o|"] / measures["deviations"]["logits"]
        for model in results["models"].values()
        for layer, measures in model["geometry"].items()
    }


CLAIMS = (
    claim("Figures 3, 5: up to 4 times",
          "On synthetic attention, oracle samples of 5 % and tables of K=10, L=150 have a lower "
          "error than as many top-k keys", "sampling",
          below("drawn/{deviation}/oracle/0.05/error", "drawn/{deviation}/topk/0.05/error"),
          below("drawn/{deviation}/by_tables/0/magicpig/error",
                "drawn/{deviation}/by_tables/0/topk/error"),
          unit="error", model=SYNTHETIC),
    claim("Figures 3, 5: near 12k of 16k",
          "On synthetic attention, top-k has the lower error from 60 to 85 % of the keys on "
          "(100 %: never)", "sampling",
          within(crossings, 0.725, by=0.125), unit="share", model=SYNTHETIC),
    claim("Figures 3, 5",
          "With 5 % of the keys, oracle sampling has an error two standard errors below top-k's in "
          "over half of the layers (budgets: of all keys; captured: with exact ends)", "sampling",
          above(lower_than_topk("oracle", "budgets", "0.05"), 0.5),
          above(lower_than_topk("oracle", "captured", "0.05"), 0.5),
          unit="share", model=REAL),
    claim("Figure 4",
          "On synthetic attention whose top fifth of the keys has 70 to 80 % of the weight, top-k "
          "with this fifth has an error of 15 to 20 %", "sampling",
          within(topk_errors, 0.175, by=0.025), unit="share", model=SYNTHETIC),
    claim("Figure 4", "In a layer, the top fifth of the keys has 70 to 80 % of the weight",
          "sampling", within("models/{model}/long_tail/{layer}/all/weight", 0.75, by=0.05),
          unit="share", model=REAL),
    claim("Figure 8b, c: up to 3 % and 8 % of a score",
          "Keys selected by hash tables have an error two standard errors below that of as many "
          "top-k keys in over half of 20 cases (layers, shares)", "sampling",
          above(lower_than_topk("magicpig"), 0.5), unit="share", model=REAL),
    claim("vAttention (arXiv 2510.05688), section 4",
          "The largest logits and a sample (`vattention`) have an error two standard errors below "
          "that of as many top-k keys in over half of 20 cases", "sampling",
          above(lower_than_topk("vattention"), 0.5), unit="share", model=REAL),
    claim("not claimed", "At equal shares, `magicpig` has a lower error than any other method",
          "sampling", below(over_best), unit="error", model=REAL),
    claim("Figure 8a", "Without centring, tables that find 2 % of centred keys find under 0.1 %",
          "sampling", below("models/{model}/captured/magicpig, uncentred/0.02/share", 0.001),
          unit="share", model=REAL),
    claim("Figure 8a", "Without centring, these tables have a higher error in every layer",
          "sampling", above(error_path(UNCENTRED, "0.02"), error_path("magicpig", "0.02")),
          unit="error", model=REAL),
    claim("Figures 2c, 9: -0.9 to -0.8",
          "In layers with a sink (over 30 % of the attention), its key has a cosine under -0.8 "
          "with the mean key, averaged over heads", "sampling",
          below(in_sink_layers("sink key with mean key"), -0.8, sure=False),
          unit="error", model=REAL, beside="attention_maps"),
    claim("Figures 2c, 9: above 0.99 and 0.9",
          "In layers with a sink, sink keys of two texts have a cosine above 0.99, averaged over "
          "heads", "sampling",
          above(in_sink_layers("sink keys of two stretches"), 0.99, sure=False),
          unit="error", model=REAL, beside="attention_maps"),
    claim("Figures 2c, 9: above 0.99 and 0.9",
          "In layers with a sink, mean keys of two texts have a cosine above 0.9, averaged over "
          "heads", "sampling",
          above(in_sink_layers("mean keys of two stretches"), 0.9, sure=False),
          unit="error", model=REAL, beside="attention_maps"),
    claim("Figure 10", "The log distance of values from the output varies under a quarter as much "
          "as logits (standard deviations over keys)", "sampling",
          below(deviations, 0.25), unit="times", model=REAL),
    claim("Figure 11", "In layers with a sink, the sink's value is under half as long as others, "
          "averaged over heads", "sampling",
          below(in_sink_layers("value of the sink over others"), 0.5, sure=False),
          unit="times", model=REAL, beside="attention_maps"),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
