"""MagicPIG's premises at small scale: the error of attention to a share of the keys, by selection
(arXiv 2410.16179, Figures 2 to 5 and 8a, Tables 7 and 8, appendices B, D and G).

The model read stretches of text within its trained context; the last tokens of each are the
queries. `captured`: both ends are exact, and a share of the keys between is selected by the methods
of evals/magicpig/matched_budgets.py. K and L of a layer were chosen so that the mean inclusion
probability of its keys is that share. The record has the share that was read: Quest takes whole
pages, and oracle draws may select a key more than once. `budgets`: all keys but the query's own may
be selected, and each oracle draw counts. `drawn`: synthetic attention over 16,384 keys with normal
logits, also with tables as published. `tables`: published tables by formula, and shares that were
counted on random keys. Errors are divided by the norm of exact attention and averaged over query
heads; intervals are over the stretches. The commit of the record has its command.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from jaxkv.evals.lib.measured_on import REAL, SYNTHETIC
from jaxkv.evals.lib.verdict import Derived, Results, above, below, claim, decisions, within

UNCENTRED = "magicpig, uncentred"
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


def table_sizes(results: Results) -> dict[str, float]:
    """Bytes of tables by formula over the published ones, minus 1."""
    rows = results["tables"]["table_7"]
    return {
        f"{row['model']}, {row['L']}, {row['thousand_tokens']}": row["table_gib"]
        / row["published"]["table_gib"] - 1
        for row in rows
    }  # fmt: skip


def table_8_shares(formula: str) -> Derived:
    """Shares of Table 8 by a formula over the published ones, minus 1."""
    return lambda results: {
        f"{row['K']}, {row['L']}": row[formula] / row["published"] - 1
        for row in results["tables"]["table_8"]
    }


def counted(results: Results) -> dict[str, float]:
    """Counted shares over computed ones, minus 1."""
    return {
        f"K={row['K']}, L={row['L']}": row["share"]["median"] / row["isotropic"] - 1
        for row in results["tables"]["table_8_counted"]
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
    claim("Table 7", "By formula, the bytes of hash tables differ from the published, rounded "
          "ones by at most 3 %", "sampling", within(table_sizes, by=0.03), unit="share",
          model="formulas"),
    claim("Table 8", "Isotropic keys of dimension 88 give the published shares within 20 %",
          "sampling", within(table_8_shares("isotropic"), by=0.2), unit="share", model=SYNTHETIC),
    claim("Table 8, equation 21", "Equation 21 gives the published shares within 20 %",
          "sampling", within(table_8_shares("equation 21"), by=0.2), unit="share",
          model="formulas"),
    claim("Table 8", "Tables find the computed share of isotropic keys within 5 %", "sampling",
          within(counted, by=0.05), unit="share", model=SYNTHETIC),
    claim("appendix G", "Top-k overestimates the mean of the zoo example, by budget", "sampling",
          above("tables/zoo/budgets/{budget}/top_k", "tables/zoo/mean"), unit="number",
          model=SYNTHETIC),
    claim("appendix G", "A sample estimates the mean of the zoo example within 0.05, by budget",
          "sampling",
          within("tables/zoo/budgets/{budget}/mean_of_samples", "tables/zoo/mean", by=0.05),
          unit="number", model=SYNTHETIC),
)  # fmt: skip
