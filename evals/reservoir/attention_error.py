"""The error of attention under sampled caches, by the exponent of the weights, on a real model.

Keys, values and queries of some layers are captured from the beginnings of texts. Each policy reads
them with absolute positions, and its output is compared with exact causal attention. The error is
relative to the norm of exact attention, and its mean is over the queries after the first 512 tokens
and over heads. Intervals are over texts. The commit of the record has its command.
"""

from __future__ import annotations

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import Statement, below

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


TABLES = {"attention_error": errors_table}
STATEMENTS = tuple(
    Statement(page, "lower the error of attention", "attention_error",
              [below(f"rows/{name}, {exponent}/by_text", f"rows/{name}, 0/by_text")
               for name in SAMPLED for exponent in ("0.25", "0.5", "1")])
    for page in ("docs/results/reservoir.md", "evals/NEGATIVE.md")
)  # fmt: skip
