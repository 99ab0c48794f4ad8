"""Claims on the error of attention to some of the keys: MagicPIG's premises, and one on its future
work.

Errors are relative to the norm of exact attention, by layer: means over layers would be those of
the layer with the largest errors. Methods read an equal share of the keys between the ends; the K
and L for a share differ by layer. A verdict on a model counts layers. Synthetic data explain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, hypot, log
from statistics import mean
from typing import Any

import numpy as np

from jaxkv.evals.lib.claim import (
    NOT,
    Claim,
    Finding,
    Results,
    adder,
    by_all,
    grade,
    joined,
    listed,
    percent,
    pick,
)
from jaxkv.evals.lib.measured_on import REAL, SYNTHETIC
from jaxkv.evals.magicpig.published_tables import WITHIN_7, WITHIN_8

METHODS = ("magicpig", "topk", "oracle", "quest", "vattention", "uniform", "topp")
SINK = 0.3  # of the attention: a layer that gives its first token more has a sink
FORMULA = "formulas"
ERRORS: list[Claim] = []
claim = adder(ERRORS)


def by_layer(kinds: Mapping[str, Any], share: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each layer with the errors of every kind at a share."""
    for layer in next(iter(kinds.values()))[share]["layers"]:
        yield layer, {kind: found[share]["layers"][layer]["error"] for kind, found in kinds.items()}


def surely_lower(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether the difference of two mean errors is more than two standard errors."""
    noise = hypot(one["standard_error"], other["standard_error"])
    return other["mean"] - one["mean"] > 2 * noise


def three(x: Mapping[str, float]) -> str:
    """A mean with two standard errors, in three digits."""
    return f"{x['mean']:.3f} ± {2 * x['standard_error']:.3f}"


def most(wins: Sequence[bool]) -> str:
    """The verdict by layers: all of them, at least half, or fewer."""
    return grade(all(wins), 2 * sum(wins) >= len(wins))


@claim("sampling", "At small budgets, oracle sampling has a lower attention error than top-k",
       "Figures 3, 5: up to 4 times, crossing near 12k of 16k")  # fmt: skip
def oracle_beats_topk(r: Results) -> Finding:
    """By budget, on synthetic attention and on the layers of models."""
    pair = ("topk", "oracle")
    drawn = {sigma: [found[kind]["0.05"]["error"]["median"] for kind in pair]
             for sigma, found in r["drawn"].items()}  # fmt: skip
    crossing = pick(r, "drawn/*/crossing")
    shown = [
        f"logits with deviation {sigma}: top-k {topk:.2f}, oracle {oracle:.3f}, "
        + (f"crossing at {crossing[sigma]:.2f}" if crossing[sigma] else "no crossing")
        for sigma, (topk, oracle) in drawn.items()
    ]
    wins = []
    for name, found in r["models"].items():
        for how, part in (("", "budgets"), (", with exact ends", "captured")):
            for layer, x in by_layer({kind: found[part][kind] for kind in pair}, "0.05"):
                wins.append(surely_lower(x["oracle"], x["topk"]))
                shown.append(f"{name}, layer {layer}{how}: {listed(x, three)}")
    near_12k = any(x and 0.6 < x < 0.85 for x in crossing.values())  # of 16,384 keys
    as_said = near_12k and all(oracle < topk for topk, oracle in drawn.values())
    return (
        "errors at a budget of 5 %; synthetic attention over 16,384 keys with the budget at which "
        f"the errors cross, then layers of models; {joined(shown)}; in models, that of oracle "
        f"sampling is surely lower in {sum(wins)} of {len(wins)} cases"
    ), most(wins) if as_said else NOT


@claim("sampling", "Top-k's error is 15 to 20 % if a fifth of the keys has 70 to 80 % of the "
       "weight", "Figure 4")  # fmt: skip
def long_tail(r: Results) -> Finding:
    drawn = {
        f"synthetic, deviation {sigma}":
            (found["mass_of_top_fifth"], found["topk"]["0.2"]["error"]["median"])
        for sigma, found in r["drawn"].items()
    }  # fmt: skip
    real = {
        f"{name}, layer {n}": (layer["all"]["weight"]["mean"], layer["all"]["error"]["mean"])
        for name, found in r["models"].items() for n, layer in found["long_tail"].items()
    }  # fmt: skip
    shown = [f"{name}: {weight:.0%} of the weight, error {x:.2f}"
             for name, (weight, x) in drawn.items()]  # fmt: skip
    shown += [f"{name}: {weight:.0%}, {x:.3f}" for name, (weight, x) in real.items()]
    tail = lambda found: [error for weight, error in found.values() if 0.7 <= weight <= 0.8]  # noqa: E731
    as_said = any(0.15 <= x <= 0.2 for x in tail(drawn))
    whole = as_said and bool(tail(real)) and min(tail(real)) >= 0.15
    return f"the top fifth of the keys and top-k's error with it; {joined(shown)}", grade(
        whole, as_said
    )


def lower_than_topk(r: Results, method: str) -> tuple[list[str], list[bool]]:
    """The errors of a method and of top-k by share and layer, and where that of the method is
    surely lower."""
    shown, wins = [], []
    for name, found in r["models"].items():
        kinds = {kind: found["captured"][kind] for kind in (method, "topk")}
        for share in kinds[method]:
            each = dict(by_layer(kinds, share))
            wins += [surely_lower(x[method], x["topk"]) for x in each.values()]
            line = {f"layer {n}": f"{three(x[method])} and {three(x['topk'])}"
                    for n, x in each.items()}  # fmt: skip
            shown.append(f"{name}, {percent(share)}: {listed(line, str)}")
    return shown, wins


@claim("sampling", "Keys selected by hash tables have a lower error than as many top-k keys",
       "Figure 8b, c: up to 3 % and 8 % of a score")  # fmt: skip
def beats_topk(r: Results) -> Finding:
    drawn = {
        sigma: {kind: found["by_tables"][0][kind]["error"]["median"] for kind in METHODS[:3]}
        for sigma, found in r["drawn"].items()
    }
    lines = [f"synthetic, deviation {sigma}, (10, 150): {listed(x, '{:.3f}'.format)}"
             for sigma, x in drawn.items()]  # fmt: skip
    shown, wins = lower_than_topk(r, "magicpig")
    return (
        f"{joined(lines)}; errors of magicpig and of top-k by share of the keys: {joined(shown)}; "
        f"that of magicpig is surely lower in {sum(wins)} of {len(wins)} cases"
    ), most(wins)


@claim("sampling", "A sample beside the largest logits (vattention) has a lower error than as many "
       "top-k keys", "vAttention (arXiv 2510.05688), section 4", model=REAL)  # fmt: skip
def vattention_beats_topk(r: Results) -> Finding:
    shown, wins = lower_than_topk(r, "vattention")
    return (
        f"errors of vattention and of top-k by share of the keys: {joined(shown)}; that of "
        f"vattention is surely lower in {sum(wins)} of {len(wins)} cases"
    ), most(wins)


@claim("sampling", "At equal shares, magicpig has the lowest attention error of all methods",
       "not claimed", model=REAL)  # fmt: skip
def at_equal_share(r: Results) -> Finding:
    lines, best = {}, []
    for name, found in r["models"].items():
        kinds = {kind: found["captured"][kind] for kind in METHODS}
        for share in kinds["magicpig"]:
            for layer, x in by_layer(kinds, share):
                lines[f"{name}, {percent(share)}, layer {layer}"] = {
                    kind: error["mean"] for kind, error in x.items()
                }
                best.append(min(x, key=lambda kind, x=x: x[kind]["mean"]) == "magicpig")
    return joined(f"{name}: {listed(x)}" for name, x in lines.items()), by_all(best)


@claim("sampling", "Without centring fewer than 0.1 % of the keys are found, and answers are lost",
       "Figure 8a", model=REAL)  # fmt: skip
def centring(r: Results) -> Finding:
    """With the K and L that find 2 % of centred keys."""
    few, worse, shown = [], [], []
    for name, found in r["models"].items():
        kinds = {kind: found["captured"][kind] for kind in ("magicpig", "magicpig, uncentred")}
        share = {kind: x["0.02"]["share"] for kind, x in kinds.items()}
        few.append(share["magicpig, uncentred"] < 0.001)
        lines = []
        for layer, x in by_layer(kinds, "0.02"):
            worse.append(x["magicpig, uncentred"]["mean"] > x["magicpig"]["mean"])
            lines.append(f"layer {layer}: {' and '.join(three(x[kind]) for kind in kinds)}")
        found_keys = " and ".join(f"{x:.2%}" for x in share.values())
        shown.append(f"{name}: {found_keys} found; errors in {', '.join(lines)}")
    return (
        f"with and without centring, {joined(shown)}; of keys in a cone opposite the query none "
        "(a test)"
    ), grade(all(few) and all(worse), all(worse))


def layers_of_geometry(r: Results, maps: Results) -> Iterator[tuple[str, bool, Results]]:
    """The name of each layer, whether it has a sink, and its geometry. maps: attention_maps."""
    for name, model in r["models"].items():
        for layer, found in model["geometry"].items():
            first = maps["first_token"]["by_layer"][int(layer)]
            yield f"{name}, layer {layer} ({first:.0%})", first > SINK, found


@claim("sampling", "Sink keys are opposite to the other keys, and both hardly depend on the text",
       "Figures 2c, 9: -0.9 to -0.8; above 0.99 and 0.9", model=REAL,
       beside="attention_maps")  # fmt: skip
def geometry_of_keys(r: Results, maps: Results) -> Finding:
    """By layers with a sink; a layer without one has no sink key."""
    pairs = ("sink key with mean key", "sink keys of two stretches", "mean keys of two stretches")
    shown, sinks = [], []
    for name, sink, found in layers_of_geometry(r, maps):
        cosines = {pair: found[pair]["mean"] for pair in pairs}
        sinks += [cosines] if sink else []
        shown.append(f"{name}: {listed(cosines)}" + ("" if sink else ", no sink, not counted"))
    opposite, keys, means = ([x[pair] for x in sinks] for pair in pairs)
    facts = [max(opposite) < -0.8, min(keys) > 0.99, min(means) > 0.9] if sinks else [False]
    return (
        f"mean cosines over KV heads by layer, with its attention to the first token; a layer with "
        f"more than {SINK:.0%} has a sink; {joined(shown)}"
    ), by_all(facts)


@claim("sampling", "The distance of values from the output hardly varies, and a sink's value is "
       "small", "Figures 10, 11", model=REAL, beside="attention_maps")  # fmt: skip
def geometry_of_values(r: Results, maps: Results) -> Finding:
    shown, flat, small = [], [], []
    for name, sink, found in layers_of_geometry(r, maps):
        deviations, length = found["deviations"], found["value of the sink over others"]["mean"]
        logs, logits = deviations["log |v - o|"], deviations["logits"]
        flat.append(logs < logits / 4)
        small += [length < 0.5] if sink else []
        shown.append(
            f"{name}: deviation of the log of a value's distance from the output {logs:.2f}, of "
            f"logits {logits:.2f}, length of the first token's value over that of others "
            f"{length:.2f}" + ("" if sink else " (no sink, not counted)")
        )
    return (f"by layer, with its attention to the first token; {joined(shown)}"), grade(
        all(flat) and bool(small) and all(small), all(flat)
    )


@claim("sampling", "Memory of hash tables and projectors", "Table 7", model=FORMULA)
def table_7(r: Results) -> Finding:
    rows = r["tables"]["table_7"]
    pairs = [(row["table_gib"], row["published"]["table_gib"]) for row in rows]
    worst = max(min(abs(x / y - 1), abs(x - y) / 0.05 * WITHIN_7) for x, y in pairs)
    shown = {f"{row['model']} ({row['K']}, {row['L']}) at {row['thousand_tokens']}K":
             f"{x:.2f} ({y})" for row, (x, y) in zip(rows, pairs, strict=True)}  # fmt: skip
    return f"by formula (published), GiB: {listed(shown, str)}", grade(worst <= WITHIN_7)


@claim("sampling", "The shares of keys that K and L select", "Table 8, equation 21",
       model=SYNTHETIC)  # fmt: skip
def table_8(r: Results) -> Finding:
    """Isotropic keys of dimension 88, and equation 21, which the paper gives as well."""
    rows = r["tables"]["table_8"]
    off = [abs(row["isotropic"] / row["published"] - 1) for row in rows]
    by_formula = [row["published"] / row["equation 21"] for row in rows]
    counted = {
        f"({x['K']}, {x['L']})": f"{x['share']['median']:.2%} (computed {x['isotropic']:.2%})"
        for x in r["tables"]["table_8_counted"]
    }
    return (
        f"shares of isotropic keys of dimension 88 differ from the published ones by "
        f"{mean(off):.0%} on average, {max(off):.0%} at most; published ones are "
        f"{min(by_formula):.2f} to {max(by_formula):.2f} times those of equation 21; counted here: "
        f"{listed(counted, str)}"
    ), grade(mean(off) <= WITHIN_8 / 2, part=True)


@claim("sampling", "Top-k overestimates the mean of the zoo example, a sample does not",
       "appendix G", model=SYNTHETIC)  # fmt: skip
def zoo(r: Results) -> Finding:
    found = r["tables"]["zoo"]
    ten, twenty = found["budgets"].values()
    return (
        f"mean {found['mean']:.1f}; for budgets of 10 and 20: top-k {ten['top_k']:.2f} and "
        f"{twenty['top_k']:.2f}; standard deviation of a sample by formula "
        f"{ten['deviation_of_sample']:.2f} and {twenty['deviation_of_sample']:.2f}, measured "
        f"{ten['deviation_of_samples']:.2f} and {twenty['deviation_of_samples']:.2f}"
    ), grade(abs(ten["mean_of_samples"] - found["mean"]) < 0.05)


HASHES = ("simhash", "crosspolytope")
READ, TARGETS = (0.1, 0.2, 0.4), (0.05, 0.1, 0.2)  # shares of the keys, and errors
SHARES = (0.02, 0.05, 0.1, 0.2)


def error_at(frontier: Sequence[Results], share: float) -> float:
    """The error at a share of the keys, between the points of a frontier, in logarithms."""
    shares, errors = ([log(point[of]) for point in frontier] for of in ("share", "error"))
    return exp(np.interp(log(share), shares, errors))


def smallest(points: Sequence[Results], hash_: str, read: float, target: float) -> Results | None:
    """The point with the smallest tables that reads at most a share of the keys and whose error
    plus two standard errors is at most the target."""
    good = [
        x for x in points
        if x["hash"] == hash_ and x["share"] <= read
        and x["error"]["mean"] + 2 * x["error"]["standard_error"] <= target
    ]  # fmt: skip
    return min(good, key=lambda x: (x["table_bytes"], x["share"]), default=None)


@claim("tune_lsh", "A cross-polytope hash needs smaller tables for the same error",
       "appendix F: future work", beside="sampling")  # fmt: skip
def tuned(r: Results, sampled: Results) -> Finding:
    """The smallest tables that read few keys, by hash, and the errors at an equal share."""
    show = lambda x: "none" if x is None else (  # noqa: E731
        f"{x['of_cache']:.2f} (K={x['K']}, L={x['L']}, {x['share']:.0%} read)"
    )  # fmt: skip
    parts, smaller = [], []
    for name, found in r["models"].items():
        for read in READ:
            for target in TARGETS:
                pair = [smallest(found["points"], kind, read, target) for kind in HASHES]
                if any(pair):
                    parts.append(f"{read:.0%} and {target:g}: {' and '.join(map(show, pair))}")
                    plain, cross = pair
                    smaller.append(
                        bool(cross) and (not plain or cross["table_bytes"] < plain["table_bytes"])
                    )
        frontiers = [found["frontier"][kind] for kind in HASHES]
        ratios = {}
        for share in SHARES:
            plain, cross = (error_at(frontier, share) for frontier in frontiers)
            ratios[f"{share:.0%}"] = cross / plain
        least = smallest(found["points"], HASHES[0], 1.0, r["target"])
        parts.append(
            f"error of {HASHES[1]} over that of {HASHES[0]} at an equal share of keys, along the "
            f"frontiers of share and error, for tables of any size: {listed(ratios)}"
        )
        parts.append(f"the smallest tables for an error of {r['target']:g}: {show(least)}")
        if name in sampled["models"]:
            topk = sampled["models"][name]["captured"]["topk"]["0.2"]["error"]["mean"]
            parts.append(f"top-k has an error of {topk:.2f} with 20% read (record sampling)")
    return (
        "means over layers; the smallest tables over keys and values, of "
        f"{' and '.join(HASHES)}, by the largest share that is read and the error: {joined(parts)};"
        f" smaller in {sum(smaller)} of {len(smaller)} cases of a coarse grid of K and L"
    ), by_all(smaller)
