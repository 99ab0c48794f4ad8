"""Weights and caches in integers on SmolLM2-135M-Instruct: bytes, loss and decoding speed.

Losses are those of a novel, token by token in all forms. Decoding continues from a prompt; all
forms alternate in one process. The file of the model is in Q4_1, whose grid int4 keeps, so the loss
of weights is also measured on the default model, which was trained and published in float32.
`snapkv` is scored on the second half of each stretch, after its first half was compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv import defaults, models
from jaxkv.evals.lib.paired_losses import bin_means
from jaxkv.evals.lib.record import (
    Record,
    make_parser,
    read,
    run_command,
    spread,
    standard_error,
)
from jaxkv.evals.lib.state_sizes import prefilled_bytes
from jaxkv.evals.lib.table import page_table, ranged, table_head, table_row
from jaxkv.evals.lib.text import tokens_of
from jaxkv.evals.lib.timing import bar, decode_after_prompt, rate, ratio, time_rounds
from jaxkv.evals.lib.verdict import Statement, below, within
from jaxkv.models.generation.score import gather
from jaxkv.models.loading import smollm2
from jaxkv.models.loading.llm import DEFAULT, Llm
from jaxkv.models.network.quantised import FORMATS
from jaxkv.policy_spec import parse_policy
from jaxkv.state.memory import show

FORMS = ("float32", *FORMATS)  # of weights
POLICIES = {
    "streaming": "sinks=4,window=1020",
    "reservoir": "sinks=4,window=508,sample=512",
    "balance-stream": "sinks=4,window=892,levels=3,block=64",
    "snapkv": "capacity=512,start=1024",
}
CACHED = {name: 512 if name == "snapkv" else 1024 for name in POLICIES}
DTYPES = {"float32": 0.27, "bfloat16": 0.53}  # bars: bytes in int8 over those in the dtype
STRETCH = 2048  # tokens of a prompt and its continuation
PROMPT, NEW = 1024, 32  # tokens of a cache when decoding is timed, and to decode


def main() -> None:
    parser = make_parser("jaxkv.evals.benchmarks.quantisation", __doc__, rounds=9)
    parser.add_argument("subject", choices=("weights", "caches"))
    parser.add_argument("--text", type=Path, required=True, help="a novel")
    parser.add_argument("--tokens", type=int, default=20_000, help="to score")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = 2 * STRETCH, 2
    name, run = {
        "weights": ("quantised_weights", run_weights),
        "caches": ("cache_int8", run_caches),
    }[options.subject]
    record = Record(name, [smollm2.fetch(), options.text], [0], quick=options.quick)
    record.finish(run(options.text, options.tokens, options.rounds))


def difference(losses: np.ndarray, base: np.ndarray) -> dict[str, Any]:
    """The mean difference of losses of the same tokens, and its standard error."""
    apart = losses - base
    return {
        "difference": float(np.mean(apart)),
        "standard_error": standard_error(bin_means(apart)),
    }


def run_weights(text: Path, tokens: int, rounds: int) -> dict[str, Any]:
    llms = load(smollm2.NAME)
    results = weights_loss(llms, text, tokens) | weights_speed(llms, rounds)
    results["bytes"] = {name: nbytes(llm) for name, llm in llms.items()}
    results["default model"] = weights_loss(load(DEFAULT), text, tokens)
    return results | {"bars": weights_bars(results)}


def load(model: str | Path) -> dict[str, Llm]:
    """The model in every form."""
    formats = dict.fromkeys(FORMS) | {form: form for form in FORMATS}
    return {form: models.load(model, "float32", weights=at) for form, at in formats.items()}


def nbytes(llm: Llm) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(llm.weights))


def weights_bars(results: dict[str, Any]) -> list[dict[str, Any]]:
    size, title = results["bytes"], "decoding with {} weights over {}, batch 1: tokens per second"
    return [
        bar("bytes of weights in int8 over float32", size["int8"] / size["float32"], "<=", 0.26),
        *(bar(f"loss of {form} weights over float32, SmolLM2-135M, nats per token, absolute",
              abs(results["difference"][form]), "<=", 0.01) for form in FORMATS),
        bar(title.format("int8", "float32"), results["faster"]["int8, batch 1"], ">=", 1.5),
        bar(title.format("int4", "int8"), results["int4_over_int8"]["batch 1"], ">=", 1),
    ]  # fmt: skip


def weights_loss(llms: Mapping[str, Llm], text: Path, tokens: int) -> dict[str, Any]:
    """The mean loss of each form, and its difference to float32 with the standard error."""
    ids, _ = tokens_of(llms["float32"], text, tokens)
    losses = {name: models.score(llm, ids).losses for name, llm in llms.items()}
    apart = {form: difference(losses[form], losses["float32"]) for form in FORMATS}
    by_form = {
        key: {form: values[key] for form, values in apart.items()}
        for key in ("difference", "standard_error")
    }
    means = {name: float(np.mean(values)) for name, values in losses.items()}
    return {"text": text.stem, "tokens": len(ids), "loss": means} | by_form


def weights_speed(llms: Mapping[str, Llm], rounds: int, new: int = NEW) -> dict[str, Any]:
    """Tokens per second of each form, and their ratios."""
    batches = (1, 8)
    variants = {
        f"{name}, batch {batch}": decode_after_prompt(llm, defaults.POLICY, 300, new, batch)
        for batch in batches
        for name, llm in llms.items()
    }
    seconds = time_rounds(variants, rounds, "forms of the weights")

    def over(slow: str, fast: str, batch: int) -> dict[str, float]:
        return ratio(seconds[f"{slow}, batch {batch}"], seconds[f"{fast}, batch {batch}"])

    return {
        "policy": defaults.POLICY,
        "tokens_per_second": {
            name: rate(int(name[-1]) * new, taken) for name, taken in seconds.items()
        },
        "faster": {f"{form}, batch {batch}": over("float32", form, batch)
                   for form in FORMATS for batch in batches},
        "int4_over_int8": {f"batch {batch}": over("int8", "int4", batch) for batch in batches},
    }  # fmt: skip


def run_caches(text: Path, tokens: int, rounds: int) -> dict[str, Any]:
    llm = models.load(smollm2.NAME, "float32")
    ids, _ = tokens_of(llm, text, tokens)
    results = {
        "text": text.stem,
        "policies": POLICIES,
        "bytes": {name: cache_shares(llm, name) for name in POLICIES},
        "loss": {name: cache_losses(llm, name, ids) for name in POLICIES},
        "speed": cache_speed(llm, rounds),
    }
    return results | {"bars": cache_bars(results)}


def cache_bars(results: dict[str, Any]) -> list[dict[str, object]]:
    lines = []
    for name in POLICIES:
        title = f"{name} with storage=int8 over floating point"
        loss, faster = results["loss"][name]["difference"], results["speed"][name]["faster"]
        lines += [
            *(
                bar(f"{title}: bytes, of {dtype}", results["bytes"][name][dtype], "<=", bound)
                for dtype, bound in DTYPES.items()
            ),
            bar(f"{title}: loss, nats per token", loss, "<=", 0.002),
            bar(f"{title}: tokens per second, batch 1", faster, ">=", 0.95),
        ]
    return lines


def forms(name: str) -> dict[str, str]:
    """The policy strings of a cache in floats and in int8."""
    return {form: f"{name}:{POLICIES[name]},storage={form}" for form in ("float", "int8")}


def cache_shares(llm: Llm, name: str) -> dict[str, float]:
    """Bytes of all layers in int8 over those in each dtype, after a prompt."""

    def count(policy: str, dtype: str) -> int:
        spec = replace(llm.spec, dtype=dtype)
        return sum(prefilled_bytes(layer, spec, PROMPT) for layer in llm.policies(policy))

    floats, int8 = forms(name).values()
    return {dtype: count(int8, dtype) / count(floats, dtype) for dtype in DTYPES}


def cache_losses(llm: Llm, name: str, ids: Sequence[int]) -> dict[str, Any]:
    """The mean loss of each form, and that of int8 minus floats with its standard error."""
    by_form = {
        form: np.concatenate(list(losses_of(llm, policy, ids))).astype(np.float64)
        for form, policy in forms(name).items()
    }
    return {
        "tokens": len(by_form["float"]),
        "loss": {form: float(np.mean(values)) for form, values in by_form.items()},
    } | difference(by_form["int8"], by_form["float"])


def losses_of(llm: Llm, policy: str, ids: Sequence[int]) -> Iterator[np.ndarray]:
    """The losses of a text, or of the second half of each of its stretches."""
    if parse_policy(policy).min_prompt is None:
        yield gather(models.losses(llm, ids, policy))[0]
        return
    for at in range(0, len(ids) - STRETCH + 1, STRETCH):
        first, second = ids[at : at + STRETCH // 2], ids[at + STRETCH // 2 : at + STRETCH]
        stream = models.Stream(llm, policy, tokens=STRETCH)
        stream.prefill([first])
        stream.finish_prefill()
        yield gather(models.losses(llm, second, chunk=256, stream=stream))[0]


def cache_speed(llm: Llm, rounds: int) -> dict[str, Any]:
    """Tokens per second of each cache in each form, and the ratio of both."""
    variants = {
        f"{name}, {form}": decode_after_prompt(llm, policy, PROMPT + 1, NEW)
        for name in POLICIES
        for form, policy in forms(name).items()
    }
    seconds = time_rounds(variants, rounds, "cache_int8")
    return {
        name: {
            "tokens_per_second": {
                form: spread(NEW / np.array(seconds[f"{name}, {form}"])) for form in forms(name)
            },
            "faster": ratio(seconds[f"{name}, float"], seconds[f"{name}, int8"]),
        }
        for name in POLICIES
    }


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

if __name__ == "__main__":
    run_command(main)
