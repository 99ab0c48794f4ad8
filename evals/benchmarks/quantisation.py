"""Weights and caches in integers on SmolLM2-135M-Instruct: bytes, loss and decoding speed.

Losses are those of a novel, token by token in all forms. Decoding continues from a prompt. The file
of the model is in Q4_1, whose grid int4 keeps, so the loss of weights is also that of the default
model, which was trained and published in float32. `snapkv` is scored on the second half of each
stretch, after its first half was compressed.
"""

from __future__ import annotations

from jaxkv.evals.lib.record import (
    read,
)
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.verdict import Statement, below, within
from jaxkv.models.network.quantised import FORMATS
from jaxkv.state.memory import show

FORMS = ("float32", *FORMATS)  # of weights
POLICIES = ("streaming", "reservoir", "balance-stream", "snapkv")
CACHED = {name: 512 if name == "snapkv" else 1024 for name in POLICIES}


def weights_table() -> str:
    """Bytes, speed and loss: a row per form."""
    results = read("quantised_weights")["results"]
    rates = results["tokens_per_second"]
    lines = table_head("weights", "bytes", "one sequence", "eight sequences",
                       "loss, SmolLM2-135M", "loss, default model")  # fmt: skip
    for form in FORMS:
        speeds = (ranged(rates[f"{form}, batch {batch}"], "median", ".0f") for batch in (1, 8))
        losses = ("", "") if form == "float32" else (
            f"{model['difference'][form]:+.4f} ± {2 * model['standard_error'][form]:.4f}"
            for model in (results, results["default model"])
        )  # fmt: skip
        lines.append(table_row(form, show(results["bytes"][form]), *speeds, *losses))
    caption = (
        f"Tokens per second on two CPU cores; losses over float32 in nats per token, on "
        f"{results['tokens']:,} tokens of a novel:"
    )
    return page_table(lines, caption)


def caches_table() -> str:
    """Bytes, loss and speed of each cache in int8, over floats."""
    results = read("cache_int8")["results"]
    lines = table_head("policy", "cached tokens", "bytes over float32", "bytes over bfloat16",
                       "more loss (nats per token)", "times as fast")  # fmt: skip
    for name in POLICIES:
        size, loss = results["bytes"][name], results["loss"][name]
        lines.append(table_row(
            f"`{name}`", f"{CACHED[name]:,}", f"{size['float32']:.3f}", f"{size['bfloat16']:.3f}",
            f"{loss['difference']:+.5f} ± {2 * loss['standard_error']:.5f}",
            ranged(results["speed"][name]["faster"], "median", ".2f"),
        ))  # fmt: skip
    return page_table(lines)


TABLES = {"cache_int8": caches_table, "quantised_weights": weights_table}
STATEMENTS = (
    Statement("docs/policies.md", "no cache loses more than 0.001 nats per token", "cache_int8",
              [within("loss/{policy}/difference", by=0.001)]),
    Statement("docs/policies.md", "saves memory and not time", "cache_int8",
              [below("bytes/{policy}/float32", 0.28),
               below("speed/{policy}/faster", 1, sure=False)]),
    Statement("docs/results/speed.md",
              "int4 saves memory, and decodes one sequence more slowly than int8 and than float32",
              "quantised_weights",
              [below("int4_over_int8/batch 1", 1), below("faster/int4, batch 1", 1)]),
)  # fmt: skip
