"""Tables and statements of records without a present command, and the commit that has it."""

from __future__ import annotations

from typing import Any

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import page_table, ranged, table, table_head, table_row
from jaxkv.evals.lib.verdict import Derived, Results, Statement, above, below, matches, within
from jaxkv.evals.training.sink_tables import KINDS, variant_of_record
from jaxkv.models.network.quantised import FORMATS
from jaxkv.state.memory import show

COMMIT = "ebae2f4"
GONE = (  # records that only the command at their commit makes
    "attention_error", "backcopy", "cache_int8", "default_model", "emergence", "host_time",
    "learned_memory", "lookup", "operations", "quantised_weights", "questions", "rates_gpu",
    "recall", "rehearsal", "remat", "sampling", "stream_eval", "training_peers", "tree_slots",
)  # fmt: skip
PAST = {  # what the commit measures and the present code does not, by record
    "known_answers": "`denominator_lost` and `epsilon`",
    "latency": "`bound`, `generate`, `loop` and `prefill`",
    "peers": "`checked`, another way to apply a press",
    "serving": "`host`",
    "sinks_distilled": "the variant `distilled`",
    "task_gates": "`variable-tracking`, `common-words` and `frequent-words`",
    "workarounds": "row `tally`",
}
# Former words of commands, and the present ones, replaced in this order.
FORMER_WORDS = {
    "jaxkv.evals.peers.compare": "jaxkv.evals.benchmarks.kvpress_parity",
    "jaxkv.evals.peers.llama_cpp": "jaxkv.evals.benchmarks.rates llama.cpp",
    "jaxkv.evals.peers.servers": "jaxkv.evals.benchmarks.servers",
    "jaxkv.evals.peers.transformers_rates": "jaxkv.evals.benchmarks.rates transformers",
    "jaxkv.evals.speed.chat": "jaxkv.evals.benchmarks.startup chat",
    "jaxkv.evals.speed.startup": "jaxkv.evals.benchmarks.startup starts",
    "jaxkv.evals.speed.workarounds": "jaxkv.evals.benchmarks.cpu_forms",
    "jaxkv.evals.speed": "jaxkv.evals.benchmarks",
    "-m evals.endless": "-m jaxkv.evals.streaming.endless",
    "-m evals.prefix_engine": "-m jaxkv.evals.prefix_caching.engine",
    " --record": "", " --rows 1000": "", " --vocab 16384 --trace": " --vocab 16384",
    " --agents ../shared/data/traces/sweagent_trajectories.jsonl": "",
}  # fmt: skip

PRODUCTS = ("q, k, v", "attention output", "gate, up", "down")
ALL_PRODUCTS = (*PRODUCTS, "head")
ATTENTION = "rotation, attention, cache update"
FORMS = ("float32", *FORMATS)  # of weights
POLICIES = ("streaming", "reservoir", "balance-stream", "snapkv")
CACHED = {name: 512 if name == "snapkv" else 1024 for name in POLICIES}  # tokens


def command(name: str, words: str) -> str:
    """The present command of a record, and the commit that has what is gone.

    words: the command as it was given.
    """
    if name in GONE:
        return f"`{words.removeprefix('python -m ')}` at its commit"
    for former, present in FORMER_WORDS.items():
        words = words.replace(former, present)
    gone = f", and commit {COMMIT} for {PAST[name]}" if name in PAST else ""
    return f"`{words}`{gone}"


def operations_table() -> str:
    """Shares of a step by kind of operation, and what the products of weights reach."""
    results = read("operations")["results"]
    limits = {name: limit["median"] / 1e9 for name, limit in results["limits"].items()}
    caption = (
        f"`{results['policy']}`, medians of {results['rounds']} rounds. Limits of the same rounds: "
        f"{limits['bandwidth']:.1f} GB/s and {limits['flops']:.0f} GFLOP/s."
    )
    lines = table_head("case", "ms", "products of weights", "attention and cache", "other",
                       "products: of the bandwidth", "of the FLOP limit")  # fmt: skip
    for name, case in results["cases"].items():
        lines.append(table_row(name, *operations_row(case, limits)))
    return page_table(lines, caption)


def operations_row(case: dict[str, Any], limits: dict[str, float]) -> list[str]:
    """The cells of one case. limits: 10^9 bytes and operations per second."""
    took = {row: data["milliseconds"]["median"] for row, data in case["rows"].items()}
    products, total = sum(took[row] for row in ALL_PRODUCTS), sum(took.values())
    parts = products, took[ATTENTION], total - products - took[ATTENTION]
    rates = (
        sum(case["rows"][row][count] for row in ALL_PRODUCTS) / products / 1e6 / limits[limit]
        for count, limit in (("weight_bytes", "bandwidth"), ("flops", "flops"))
    )
    shares = (*(part / total for part in parts), *rates)
    return [f"{case['whole']['milliseconds']['median']:.1f}", *(f"{x:.0%}" for x in shares)]


def int8_over_float32(results: Results) -> dict[str, float]:
    """The time of all products of weights of one sequence in int8, over that in float32."""
    int8, float32 = (
        sum(
            value["median"]
            for row in ALL_PRODUCTS
            for _, value in matches(results, f"cases/{case}/rows/{row}/milliseconds")
        )
        for case in ("decode, int8, batch 1", "decode, float32, batch 1")
    )
    return {"products": int8 / float32}


def memory_ratio(results: Results) -> dict[str, float]:
    """Bytes of temporaries of a step with `remat=layers` over those without."""
    programs = results["programs"]
    return {"layers": programs["layers"]["temporaries"] / programs["none"]["temporaries"]}


def weights_table() -> str:
    """Bytes, speed and loss: a row per form.

    The file of the model is in Q4_1, whose grid int4 keeps, so the loss is also that of the default
    model, which was trained and published in float32.
    """
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
    """Bytes, loss and speed of each cache in int8, over floats.

    `snapkv` is scored on the second half of each stretch, after its first half was compressed.
    """
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


def sink_token_gains(results: Results) -> dict[str, float]:
    """By preset, the last validation loss with a sink token minus that without."""
    runs = results["runs"]
    return {
        size: runs[f"{size} token"]["valid_loss"][-1] - runs[f"{size} none"]["valid_loss"][-1]
        for size in ("tiny", "small")
    }


def largest_attention(*sinks: str) -> Derived:
    """The largest attention of a head on the first token, at the end of the runs of these sinks."""
    return lambda results: {
        name: run["first_token_most"][-1]
        for name, run in results["runs"].items()
        if variant_of_record(run) in sinks
    }


def runs_table() -> str:
    """A row per run of `jaxkv pretrain`, at its end: when heads become attention sinks.

    Gu et al. (2024, arXiv 2410.10781) measure the same attention on models of 60 million weights
    and more.
    """
    heads = ("preset", "trained with", "million tokens", "validation loss",
             "largest attention of a head")  # fmt: skip
    cells = (
        (f"`{name.split()[0]}`", KINDS[variant_of_record(trained)],
         f"{trained['million_tokens'][-1]:.0f}", f"{trained['valid_loss'][-1]:.3f}",
         f"{trained['first_token_most'][-1]:.3f}")
        for name, trained in read("emergence")["results"]["runs"].items()
    )  # fmt: skip
    return table(heads, cells, "One run of each, at its end. Attention: on the first token.")


TABLES = {
    "cache_int8": caches_table,
    "emergence": runs_table,
    "operations": operations_table,
    "quantised_weights": weights_table,
}
NEGATIVE = "evals/NEGATIVE.md"
PAGE, ROW = "docs/results/speed.md", "cases/{}/rows/{}/{}"
CHUNK = "prefill, float32, chunk of 1,024"
LESS_TIME = [above(int8_over_float32, 0.75), below(int8_over_float32, 1)]
STATEMENTS = (
    Statement("docs/training.md", "A step of `tiny` on a CPU then has about a third of the "
              "temporaries, at about the same speed", "remat",
              [within(memory_ratio, 1 / 3, by=0.05), within("speed_over_none", 1, by=0.1)]),
    Statement("docs/training.md", "is faster than a step of a plain PyTorch loop",
              "training_peers", [above("speed_over_torch", 1)]),
    Statement(PAGE, "read a quarter of the bytes in a little less time", "operations", LESS_TIME),
    Statement(NEGATIVE, "The products read a quarter of the bytes and take a little "
              "less time", "operations", LESS_TIME),
    Statement(PAGE, "memory does not limit them", "operations",
              [below(ROW.format("decode, int8, batch 1", row, "share_of_bandwidth"), 0.3,
                     sure=False) for row in ALL_PRODUCTS]),
    Statement(PAGE, "Attention takes longer than any single product", "operations",
              [above(ROW.format(f"decode, {form}, batch 8", ATTENTION, "milliseconds"),
                     ROW.format(f"decode, {form}, batch 8", row, "milliseconds"))
               for form in ("float32", "int8") for row in ALL_PRODUCTS]),
    Statement(PAGE, "Attention takes more than half of the chunk", "operations",
              [above(ROW.format(CHUNK, ATTENTION, "share_of_whole"), 0.5, sure=False)]),
    Statement(PAGE, "It reaches a smaller share of the FLOP limit than any product of the layers",
              "operations",
              [below(ROW.format(CHUNK, ATTENTION, "share_of_flops"),
                     ROW.format(CHUNK, row, "share_of_flops")) for row in PRODUCTS]),
    Statement(PAGE, "q, k and v are the slowest for their bytes", "operations",
              [below(ROW.format("decode, float32, batch 1", "q, k, v", "bytes_per_second"),
                     ROW.format("decode, float32, batch 1", row, "bytes_per_second"), sure=False)
               for row in ALL_PRODUCTS[1:]]),
    Statement("docs/decisions/engine.md", "at most a tenth of a step of the default model and 3 % "
              "of one of SmolLM2-135M is outside its program", "host_time",
              [below(f"models/{name}/share", bound, sure=False)
               for name, bound in (("default model", 0.1), ("SmolLM2-135M", 0.03))]),
    Statement(NEGATIVE, "at batch 1 jaxkv is over twice as fast in the present record",
              "latency", [above("generate/110M batch 1/times_faster/call over transformers", 2,
                                sure=False)]),
    Statement(NEGATIVE, "No head gives the first token a tenth of its attention", "emergence",
              [below("runs/{run}/first_token_most/{evaluation}", 0.1)]),
    Statement(NEGATIVE, "most of its heads are sink heads", "attention_maps",
              [above("sink_metric", 0.5)]),
    Statement(NEGATIVE, "A sink token changes the validation loss by less than 0.15 nats per token",
              "emergence", [within(sink_token_gains, by=0.15)]),
    Statement("docs/results/training.md", "no head gives the first token a tenth of its attention, "
              "and without a sink token not even a hundredth", "emergence",
              [below(largest_attention(*KINDS), 0.1),
               below(largest_attention("none", "zero", "logit"), 0.01)]),
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
