"""MagicPIG's tables that follow from a formula: 7 and 8, and the zoo example of appendix G."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxkv.evals.lib.measured_on import SYNTHETIC
from jaxkv.evals.lib.verdict import Derived, Results, above, claim, within
from jaxkv.evals.magicpig.inclusion import isotropic, orthogonal

DIMS = 88  # of isotropic keys whose shares are those of Table 8


class ModelSizes(NamedTuple):
    """The sizes of a model that Table 7 depends on."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    mlp: int


MODELS = {
    "Llama-3.1-8B-Instruct": ModelSizes(32, 32, 8, 128, 4096, 14336),
    "Llama-3.1-70B-Instruct": ModelSizes(80, 64, 8, 128, 8192, 28672),
    "Code-Llama-13b-16K": ModelSizes(40, 40, 40, 128, 5120, 13824),
    "Code-Llama-34b-16K": ModelSizes(48, 64, 8, 128, 8192, 22016),
}
# Model, K, L, thousands of tokens: KB of projectors, GiB of tables, % of computation, as published.
TABLE_7 = {
    ("Llama-3.1-8B-Instruct", 10, 150, 96): (384, 14, 3.8),
    ("Llama-3.1-8B-Instruct", 11, 300, 96): (825, 28, 8.5),
    ("Llama-3.1-8B-Instruct", 10, 150, 64): (384, 4.7, 3.8),
    ("Llama-3.1-70B-Instruct", 10, 150, 64): (384, 11.8, 1.8),
    ("Code-Llama-13b-16K", 10, 150, 16): (384, 7.3, 5.2),
    ("Code-Llama-34b-16K", 10, 150, 16): (384, 1.8, 2.2),
}
COUNTS = (75, 100, 120, 150, 200, 300)  # L of Table 8
TABLE_8 = {  # by K, the shares that were measured, in %
    7: (14, 21, 27, 35, 48, 66),
    8: (5, 8, 11, 15, 22, 36),
    9: (1.6, 2.7, 4, 5.4, 8.5, 15.4),
    10: (0.5, 0.9, 1.5, 2, 3, 6),
    11: (0.15, 0.3, 0.5, 0.6, 1, 2),
}


def table_7(model: str, bits: int, tables: int, thousand: int) -> dict[str, float]:
    """Bytes of the projectors and of the tables in all layers, and the operations of hashing over
    those of all projections except the attention's output."""
    m = MODELS[model]
    entry = 4 if thousand > 64 else 2
    hashing = (m.heads + m.kv_heads) * m.head_dim * bits * tables
    weights = m.width * (m.heads + 2 * m.kv_heads) * m.head_dim + 3 * m.width * m.mlp
    return {
        "projector_bytes": m.head_dim * bits * tables * 2,
        "table_gib": m.layers * m.kv_heads * tables * thousand * 1024 * entry / 2**30,
        "computation": hashing / weights,
    }


def table_8() -> list[dict[str, float]]:
    """By K and L: the published share, that of equation 21, and that of isotropic keys."""
    return [
        {
            "K": bits, "L": tables, "published": share / 100,
            "equation 21": orthogonal(bits, tables), "isotropic": isotropic(bits, tables, DIMS),
        }
        for bits, shares in TABLE_8.items()
        for tables, share in zip(COUNTS, shares, strict=True)
    ]  # fmt: skip


def zoo() -> dict[str, Any]:
    """Appendix G: a hundred animals, of which ten elephants eat 50 pounds a day, ten pigs 20, ten
    tigers 10, and seventy others, each of its own kind, 1."""
    pounds = np.repeat([50.0, 20.0, 10.0, 1.0], [10, 10, 10, 70])
    draws = np.random.default_rng(0).choice(pounds, (100_000, 20))
    estimates: dict[str, Any] = {"mean": pounds.mean(), "deviation": pounds.std(), "budgets": {}}
    for budget in (10, 20):
        animals = 30 + budget - 3  # three kinds have ten animals each; a kind counts once
        estimates["budgets"][budget] = {
            "top_k": pounds[:animals].mean(),
            "animals_of_top_k": animals,
            "deviation_of_sample": pounds.std() / budget**0.5,
            "mean_of_samples": draws[:, :budget].mean(),
            "deviation_of_samples": draws[:, :budget].mean(axis=1).std(),
        }
    return estimates


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
