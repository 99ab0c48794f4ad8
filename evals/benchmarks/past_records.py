"""Tables and statements of records without a present command, and the commit that has it."""

from __future__ import annotations

from typing import Any

from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import page_table, table_head, table_row
from jaxkv.evals.lib.verdict import Results, Statement, above, below, matches, within

COMMIT = "ebae2f4"
GONE = (  # records that only the command at their commit makes; no claim of a paper rests on them
    "attention_error", "cache_int8", "emergence", "host_time", "operations", "quantised_weights",
    "rehearsal", "remat", "training_peers", "tree_slots",
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
# Words that a module no longer takes: it always writes a record, and scores no tasks.
FORMER_WORDS = {"prefix_replay": " --record", "sink_tables": " --rows 1000"}

PRODUCTS = ("q, k, v", "attention output", "gate, up", "down")
ALL_PRODUCTS = (*PRODUCTS, "head")
ATTENTION = "rotation, attention, cache update"


def command(name: str, module: str, words: str) -> str:
    """The command of a record, and the commit that has what is gone.

    module: its present name, with its arguments. words: the command as it was given.
    """
    if name in GONE:
        module = words.removeprefix("python -m ")  # which is no module now
        return f"`{module}` at its commit"
    module = module.replace(FORMER_WORDS.get(name, ""), "")
    gone = f", and commit {COMMIT} for {PAST[name]}" if name in PAST else ""
    return f"`python -m {module}`{gone}"


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


TABLES = {"operations": operations_table}
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
    Statement("evals/NEGATIVE.md", "The products read a quarter of the bytes and take a little "
              "less time", "operations", LESS_TIME),
    Statement(PAGE, "memory does not limit them", "operations",
              [below(ROW.format("decode, int8, batch 1", row, "share_of_bandwidth"), 0.3,
                     sure=False) for row in ALL_PRODUCTS]),
    Statement(PAGE, "Attention is the largest operation", "operations",
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
    Statement("evals/NEGATIVE.md", "at batch 1 jaxkv is over twice as fast in the present record",
              "latency", [above("generate/110M batch 1/times_faster/call over transformers", 2,
                                sure=False)]),
)  # fmt: skip
