"""Tables and statements of docs/results/sparse.md, and of NEGATIVE.md on LSH tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import Results, Statement, above, below, decisions, matches
from jaxkv.evals.magicpig.sampling import UNCENTRED, error_path
from jaxkv.evals.magicpig.sparse_losses import RECORDS, loss_path
from jaxkv.state.memory import show


def losses(record: str) -> str:
    """One row per method, one column per share; the setting above."""
    ((name, model),) = read(record)["results"]["perplexity"].items()
    full, ends, shares = model["full"], model["ends alone"], model["shares"]
    caption = (
        f"{name}, {model['stretches']} texts, a prompt of {model['prompt']:,} tokens, the next "
        f"{model['scored']:,} scored. Full attention has a loss of {full['loss']:.3f} and caches "
        f"of {show(full['state_bytes'])}; sinks and window alone lose {over_full(ends)} nats. Loss "
        "over full attention in nats, by share of the keys between:"
    )
    rows = []
    for method in next(iter(shares.values())):
        cells = [methods[method] for methods in shares.values()]
        sizes = dict.fromkeys(show(cell["state_bytes"]) for cell in cells)
        rows.append((f"`{method}`", *map(over_full, cells), ", ".join(sizes)))
    heads = ("method", *(f"{float(share):.0%}" for share in shares), "caches by share")
    return table(heads, rows, caption)


def over_full(line: dict[str, Any]) -> str:
    """A loss over full attention's, with two standard errors over texts."""
    loss = line["over_full"]
    return f"{loss['mean']:+.3f} ± {loss['two_errors']['stretches']:.3f}"


def errors() -> str:
    """Error of attention by method, share and layer."""
    ((name, model),) = read("sampling")["results"]["models"].items()
    shares, rows = ("0.02", "0.05", "0.2"), []
    for method in ("magicpig", UNCENTRED, "topk", "topp", "vattention"):
        by_share = [model["captured"][method][share]["layers"].values() for share in shares]
        cells = (", ".join(f"{layer['error']['mean']:.2f}" for layer in x) for x in by_share)
        rows.append((f"`{method}`", *cells))
    layers = ", ".join(map(str, model["layers"]))
    caption = f"{name}, error in layers {layers}, by share of the keys:"
    return table(("method", *(f"{float(share):.0%}" for share in shares)), rows, caption)


TABLES = {name: partial(losses, name) for name in RECORDS} | {"sparse_errors": errors}

SPARSE, NEGATIVE = "docs/results/sparse.md", "evals/NEGATIVE.md"
METHODS = ("magicpig", "topk", "topp", "quest", "vattention")  # besides oracle and uniform
PEAKED = ("7", "14", "21", "29")  # layers whose attention is not spread


def smaller_losses(results: Results) -> dict[str, float]:
    """The share of methods and budgets that lose less than after 2,048 tokens."""
    longer, shorter = (
        np.array([loss["mean"] for _, loss in matches(record, loss_path("{method}"))])
        for record in (results, read("sparse_135m")["results"])
    )
    return {"all": float(np.mean(longer < shorter))}


def more_than(method: str, share: str = "{share}") -> list[Any]:
    """Whether magicpig loses more than a method, of the same texts."""
    return [above(f"{loss_path('magicpig', share)}/each", f"{loss_path(method, share)}/each")]


def more_than_topk(results: Results) -> dict[str, float]:
    """The share of budgets at which magicpig surely loses more than top-k."""
    (claim,) = more_than("topk")
    return {"all": float(np.mean([case.holds for case in decisions(claim, results)]))}


def oracle_ratios(results: Results) -> dict[str, float]:
    """The loss of oracle over those of magicpig and topk at 2 % of the keys."""
    (model,) = results["perplexity"].values()
    means = {name: line["over_full"]["mean"] for name, line in model["shares"]["0.02"].items()}
    return {name: means["oracle"] / means[name] for name in ("magicpig", "topk")}


def beside_topk(method: str, share: str = "{share}", layer: str = "0") -> list[str]:
    """The paths of a method's error and top-k's in a layer."""
    return [error_path(name, share, layer=layer) for name in (method, "topk")]


STATEMENTS = (
    *(Statement(SPARSE, "`uniform` loses most at every share. At 2 %, `oracle` loses least", name,
                [*(below(loss_path(method), loss_path("uniform"))
                   for method in (*METHODS, "oracle")),
                 *(below(loss_path("oracle", "0.02"), loss_path(method, "0.02"), sure=False)
                   for method in METHODS)]) for name in RECORDS),
    *(Statement(SPARSE, "`oracle` draws with replacement, so it reads fewer keys than asked, at "
                "20 % less than half", name,
                [below("perplexity/{model}/shares/0.2/oracle/share_read/each", 0.1)])
      for name in ("sparse_135m", "sparse_135m_4096")),
    Statement(SPARSE, "most losses are smaller after a longer prompt", "sparse_135m_4096",
              [above(smaller_losses, 0.5)]),
    Statement(SPARSE, "10 % of the keys lose under 0.02 nats with every method but `uniform`",
              "sparse_135m_7680",
              [below(loss_path(method, "0.1"), 0.02, sure=False)
               for method in (*METHODS, "oracle")]),
    Statement(SPARSE, "at 2 % `magicpig` loses more than `quest` and `topk`", "sparse_135m_7680",
              more_than("quest", "0.02") + more_than("topk", "0.02")),
    *(Statement(NEGATIVE, "`magicpig` loses more than `topk`, by more than two standard errors, "
                "only at 2 % of 7,680 tokens", name, comparisons)
      for name, comparisons in (("sparse_135m", [below(more_than_topk, 0.01)]),
                                ("sparse_135m_4096", [below(more_than_topk, 0.01)]),
                                ("sparse_135m_7680", more_than("topk", "0.02")))),
    *(Statement(NEGATIVE, "At 2 % its loss is less than a third of theirs", name,
                [below(oracle_ratios, 1 / 3)]) for name in RECORDS),
    Statement(NEGATIVE, "In layers 7 to 29 `magicpig` has a higher error than `topk` at every "
              "share", "sampling",
              [above(*beside_topk("magicpig", layer=layer), sure=False) for layer in PEAKED]),
    Statement(NEGATIVE, "In layer 0, where attention is spread, its error is lower", "sampling",
              [below(*beside_topk("magicpig"), sure=False)]),
    Statement(NEGATIVE, "`vattention`, which combines the largest logits with a sample of the "
              "others, has a lower error than `topk` in all five layers at 20 %, and in layer 0 "
              "alone at 5 %", "sampling",
              [below(*beside_topk("vattention", "0.2", "{layer}"), sure=False),
               below(*beside_topk("vattention", "0.05")),
               *(above(*beside_topk("vattention", "0.05", layer), sure=False)
                 for layer in PEAKED)]),
    Statement(NEGATIVE, "Without centring, tables that find 2 % of the centred keys find under 1 %",
              "sampling", [below(f"models/{{model}}/captured/{UNCENTRED}/0.02/share", 0.01)]),
    Statement(NEGATIVE, "They read over a third of the keys", "tune_lsh",
              [above("models/{model}/least/simhash/share", 1 / 3)]),
)  # fmt: skip
