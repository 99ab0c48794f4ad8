"""Sampled caches: time per token over that of `streaming` of equal slots, and errors of attention.

For the errors, each policy read keys and values of the beginnings of texts with absolute positions.
An error is relative to the norm of exact attention, and its mean is over queries after the first
512 tokens and over heads. Intervals are over texts.
"""

from __future__ import annotations

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import ranged, table
from jaxkv.evals.lib.verdict import Statement, below, claim

CLAIMS = (
    claim("section 7, no figure: efficiency does not decline",
          "A token under reservoir sampling takes at most 1.05 times as long as under StreamingLLM",
          "sampled", below("token/ratio/reservoir", 1.05), unit="times"),
)  # fmt: skip


def times_table() -> str:
    """Time of a generated token over that of streaming of equal slots."""
    ratios = read("sampled")["results"]["token"]["ratio"]
    cells = ((f"`{name}`", ranged(x, "median", ".2f")) for name, x in ratios.items())
    return table(("cache", "time per token over streaming's"), cells)


EXPONENTS = (0.0, 0.25, 0.5, 1.0)  # 0: a sampled token counts once
SAMPLED = ("reservoir", "stratified", "balance-stream")


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


TABLES = {"sampled": times_table, "attention_error": errors_table}
STATEMENTS = tuple(
    Statement(page, "lower the error of attention", "attention_error",
              [below(f"rows/{name}, {exponent}/by_text", f"rows/{name}, 0/by_text")
               for name in SAMPLED for exponent in ("0.25", "0.5", "1")])
    for page in ("docs/results/reservoir.md", "evals/NEGATIVE.md")
)  # fmt: skip
