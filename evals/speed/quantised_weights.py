"""Weights in int8 and int4 on SmolLM2-135M-Instruct: bytes, loss and decoding speed.

The loss is that of the first tokens of a novel under the default cache. The file of the model is in
Q4_1, whose grid int4 keeps, so the loss is also measured on the default model, which was trained
and published in float32. Decoding continues from a prompt; all forms alternate in one process.
`bandwidth` is that of the fastest program of evals/lib/limits.py in each round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv import defaults, models
from jaxkv.evals.lib import limits
from jaxkv.evals.lib.paired_losses import bin_means
from jaxkv.evals.lib.record import Record, make_parser, read, run_command, spread, standard_error
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.text import tokens_of
from jaxkv.evals.lib.timing import bar, decode_variant, prompt, ratio, time_rounds
from jaxkv.evals.lib.verdict import Statement, below
from jaxkv.models.loading import smollm2
from jaxkv.models.loading.llm import DEFAULT, Llm
from jaxkv.models.network.quantised import FORMATS
from jaxkv.state.memory import show

FORMS = ("float32", *FORMATS)


def main() -> None:
    parser = make_parser("jaxkv.evals.speed.quantised_weights", __doc__)
    parser.add_argument("--text", type=Path, required=True, help="a novel")
    parser.add_argument("--tokens", type=int, default=20_000, help="to score")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small numbers, into out/")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = 600, 2
    record = Record("quantised_weights", [smollm2.fetch(), options.text], quick=options.quick)
    llms = load(smollm2.NAME)
    results = loss(llms, options.text, options.tokens) | speed(llms, options.rounds)
    results["bytes"] = {name: nbytes(llm) for name, llm in llms.items()}
    results["default model"] = loss(load(DEFAULT), options.text, options.tokens)
    record.finish(results | {"bars": bars(results)})


def load(model: str | Path) -> dict[str, Llm]:
    """The model in every form."""
    return {form: models.load(model, "float32", weights=form if form in FORMATS else None)
            for form in FORMS}  # fmt: skip


def bars(results: dict[str, Any]) -> list[dict[str, Any]]:
    of_model = "over float32, SmolLM2-135M"
    return [
        bar("bytes of weights in int8 over float32",
            results["bytes"]["int8"] / results["bytes"]["float32"], "<=", 0.26),
        *(bar(f"loss of {form} weights {of_model}, nats per token, absolute",
              abs(results["difference"][form]), "<=", 0.01) for form in FORMATS),
        bar("decoding with int8 weights over float32, batch 1: tokens per second",
            results["faster"]["int8, batch 1"], ">=", 1.5),
        bar("decoding with int4 weights over int8, batch 1: tokens per second",
            results["int4_over_int8"]["batch 1"], ">=", 1),
    ]  # fmt: skip


def nbytes(llm: Llm) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(llm.weights))


def loss(llms: dict[str, Llm], text: Path, tokens: int) -> dict[str, Any]:
    """The mean loss of each form, and its difference to float32 with the standard error."""
    ids, _ = tokens_of(llms["float32"], text, tokens)
    losses = {name: models.score(llm, ids).losses for name, llm in llms.items()}
    apart = {form: losses[form] - losses["float32"] for form in FORMATS}
    return {
        "text": text.stem,
        "tokens": len(ids),
        "loss": {name: float(np.mean(values)) for name, values in losses.items()},
        "difference": {form: float(np.mean(values)) for form, values in apart.items()},
        "standard_error": {
            form: standard_error(bin_means(values)) for form, values in apart.items()
        },
    }


def speed(llms: dict[str, Llm], rounds: int, new: int = 32) -> dict[str, Any]:
    """Tokens a second of each form, their ratio, and the share of the memory bandwidth."""
    limit, variants = limits.bandwidth(), {}
    for batch in (1, 8):
        for name, llm in llms.items():
            stream = models.Stream(llm, defaults.POLICY, batch=batch)
            stream.prefill([prompt(llm, 300, seed) for seed in range(batch)])
            variants[f"{name}, batch {batch}"] = decode_variant(stream, new)
    seconds = time_rounds(limit.variants | variants, rounds, "forms of the weights")
    bandwidth = limit.best(seconds)

    def over(slow: str, fast: str, batch: int) -> dict[str, float]:
        return ratio(seconds[f"{slow}, batch {batch}"], seconds[f"{fast}, batch {batch}"])

    per_token = {name: np.array(seconds[f"{name}, batch 1"]) / new for name in llms}
    return {
        "policy": defaults.POLICY,
        "tokens_per_second": {
            name: spread(int(name[-1]) * new / np.array(seconds[name])) for name in variants
        },
        "faster": {f"{form}, batch {batch}": over("float32", form, batch)
                   for form in FORMATS for batch in (1, 8)},
        "int4_over_int8": {f"batch {batch}": over("int8", "int4", batch) for batch in (1, 8)},
        "bandwidth": spread(bandwidth),
        "share_of_bandwidth": {
            name: spread(nbytes(llm) / per_token[name] / bandwidth) for name, llm in llms.items()
        },
    }  # fmt: skip


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


TABLES = {"quantised_weights": weights_table}
STATEMENTS = (
    Statement("docs/results/speed.md",
              "int4 saves memory, and decodes one sequence more slowly than int8 and than float32",
              "quantised_weights",
              [below("int4_over_int8/batch 1", 1), below("faster/int4, batch 1", 1)]),
)  # fmt: skip

if __name__ == "__main__":
    run_command(main)
