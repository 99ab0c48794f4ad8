"""Where the time goes: a decode step and a prefill chunk of SmolLM2-135M-Instruct, by operation.

Each operation of all layers is a program of its own, made of the product's functions and the real
weights (operation_programs.py). `sum of the rows` adds up their times, `whole` is the program that
the product runs, and `rest` is their difference: what the rows do not explain. It is below zero
where programs cost more alone: each is a call of its own, and starts with idle threads. All
programs and the limits of this machine (evals/lib/limits.py) take turns in one process.

Bytes are those of weights and caches that an operation must read, and its arithmetic is what it
must compute. A query of a prefill chunk attends to as many keys as the cache has slots; masked
products with other keys are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.lib import limits
from jaxkv.evals.lib.record import Record, make_parser, read, run_command, spread
from jaxkv.evals.lib.table import page_table, table_head, table_row
from jaxkv.evals.lib.timing import Variant, generate_greedy, prompt, time_rounds
from jaxkv.evals.lib.verdict import Results, Statement, above, below, matches
from jaxkv.evals.speed.operation_programs import (
    ATTENTION,
    HEAD,
    PRODUCTS,
    Caches,
    Operation,
    call,
    operations,
)
from jaxkv.models.loading import smollm2
from jaxkv.models.loading.llm import Llm

POLICY = "streaming:sinks=4,window=1020"
BATCHES = (1, 8)
Times = Mapping[str, Sequence[float]]


def main() -> None:
    parser = make_parser("jaxkv.evals.speed.operations", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--new", type=int, default=16, help="tokens of one call of the whole decoding"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, into out/")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.new = 3, 8
    record = Record("operations", [smollm2.fetch()], [0], quick=options.quick)
    llms = {
        "float32": models.load(smollm2.NAME, "float32"),
        "int8": models.load(smollm2.NAME, "float32", weights="int8"),
    }
    results = measure(llms, POLICY, options.rounds, options.new)
    record.finish(results)
    print(kinds_table(results))


def measure(llms: Mapping[str, Llm], policy: str, rounds: int, new: int) -> dict[str, Any]:
    """All cases, with the limits of the same rounds. new: tokens of one call of decoding."""
    read, multiplied = limits.bandwidth(), limits.products()
    empty = call(jax.jit(lambda x: x + 1), jnp.zeros((), jnp.float32))
    variants = read.variants | multiplied.variants | {"empty program": empty}
    cases, slots, chunk = make_cases(llms, policy, new)
    for case, (rows, program, _) in cases.items():
        variants |= {f"{case}: {row}": operation.run for row, operation in rows.items()}
        variants[f"{case}: whole"] = program
    seconds = time_rounds(variants, rounds, "operations")
    limit = {"bandwidth": read.best(seconds), "flops": multiplied.best(seconds)}
    return {
        "policy": policy,
        "slots": slots,
        "chunk": chunk,
        "rounds": rounds,
        "new": new,
        "limits": {name: spread(rates) for name, rates in limit.items()},
        "programs of limits": {
            name: spread(rates)
            for limit_set in (read, multiplied) for name, rates in limit_set.rates(seconds).items()
        },
        "milliseconds of an empty program": milliseconds(seconds["empty program"]),
        "cases": {
            case: by_row(rows, {row: np.array(seconds[f"{case}: {row}"])
                                for row in (*rows, "whole")}, steps, limit)
            for case, (rows, _, steps) in cases.items()
        },
    }  # fmt: skip


def make_cases(
    llms: Mapping[str, Llm], policy: str, new: int
) -> tuple[dict[str, tuple[dict[str, Operation], Variant, int]], int, int]:
    """Per case its operations, the whole program, and how many steps that has.

    Also the slots of the cache and the tokens of a prefill chunk. All cases of one batch size share
    one batch in progress, whose caches are full.
    """
    llm = llms["float32"]
    stream = models.Stream(llm, policy)
    chunk, slots = stream.chunk_of(None), stream.decoding.states[0].positions.shape[1]
    stream.prefill([prompt(llm, slots + 1)])
    caches = {batch: Caches(stream, batch) for batch in BATCHES}
    ids, read = prompt(llm, chunk), caches[BATCHES[0]]
    cases = {}
    for form, form_llm in llms.items():
        for batch, shared in caches.items():
            steps = models.Stream(form_llm, policy, batch)
            program = shared.lend(steps, partial(generate_greedy, steps, new))
            cases[f"decode, {form}, batch {batch}"] = operations(form_llm, shared, 1), program, new
    program = read.lend(stream, partial(stream.prefill, [ids]))
    cases[f"prefill, float32, chunk of {chunk:,}"] = operations(llm, read, chunk), program, 1
    return cases, slots, chunk


def by_row(
    rows: Mapping[str, Operation], seconds: Times, steps: int, limit: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """What each row takes and reaches. steps: that one call of the whole program has."""
    program_seconds = np.array(seconds["whole"]) / steps
    total = np.sum([seconds[row] for row in rows], axis=0)
    all_rows = Operation(
        lambda: 0.0, 1, *(sum(getattr(operation, field) for operation in rows.values())
                          for field in ("flops", "weight_bytes", "cache_bytes"))
    )  # fmt: skip
    return {
        "rows": {
            row: reached(operation, np.array(seconds[row]), program_seconds, limit)
            for row, operation in rows.items()
        },
        "sum of the rows": reached(all_rows, total, program_seconds, limit),
        "whole": reached(all_rows, program_seconds, program_seconds, limit),
        "rest": {
            "milliseconds": milliseconds(program_seconds - total),
            "share_of_whole": spread((program_seconds - total) / program_seconds),
        },
    }


def reached(
    operation: Operation,
    seconds: np.ndarray,
    program_seconds: np.ndarray,
    limit: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """One row: times, counts, rates, and their shares of the limits of the same rounds."""
    read, computed = (
        (operation.weight_bytes + operation.cache_bytes) / seconds,
        operation.flops / seconds,
    )
    return {
        "times": operation.times,
        "weight_bytes": operation.weight_bytes,
        "cache_bytes": operation.cache_bytes,
        "flops": operation.flops,
        "milliseconds": milliseconds(seconds),
        "share_of_whole": spread(seconds / program_seconds),
        "bytes_per_second": spread(read),
        "flops_per_second": spread(computed),
        "share_of_bandwidth": spread(read / limit["bandwidth"]),
        "share_of_flops": spread(computed / limit["flops"]),
    }


def milliseconds(seconds: Sequence[float] | np.ndarray) -> dict[str, float]:
    return spread(1e3 * np.asarray(seconds))


ALL_PRODUCTS = (*PRODUCTS, HEAD)


def kinds_table(results: dict[str, Any]) -> str:
    """Shares of a step by kind of operation, and what the products of weights reach."""
    limits = {name: limit["median"] / 1e9 for name, limit in results["limits"].items()}
    caption = (
        f"`{results['policy']}`, medians of {results['rounds']} rounds. Limits of the same rounds: "
        f"{limits['bandwidth']:.1f} GB/s and {limits['flops']:.0f} GFLOP/s."
    )
    lines = table_head("case", "ms", "products of weights", "attention and cache", "other",
                       "products: of the bandwidth", "of the FLOP limit")  # fmt: skip
    for name, case in results["cases"].items():
        took = {row: data["milliseconds"]["median"] for row, data in case["rows"].items()}
        products, total = sum(took[row] for row in ALL_PRODUCTS), sum(took.values())
        parts = products, took[ATTENTION], total - products - took[ATTENTION]
        rates = (
            sum(case["rows"][row][count] for row in ALL_PRODUCTS) / products / 1e6 / limits[limit]
            for count, limit in (("weight_bytes", "bandwidth"), ("flops", "flops"))
        )
        milliseconds = f"{case['whole']['milliseconds']['median']:.1f}"
        shares = (f"{part / total:.0%}" for part in parts)
        lines.append(table_row(name, milliseconds, *shares, *(f"{rate:.0%}" for rate in rates)))
    return page_table(lines, caption)


TABLES = {"operations": lambda: kinds_table(read("operations")["results"])}
PAGE, ROW = "docs/results/speed.md", "cases/{}/rows/{}/{}"


def int8_over_float32(results: Results) -> dict[str, float]:
    """The time of all products of weights of one sequence in int8, over that in float32."""
    milliseconds = [
        sum(
            median["median"]
            for row in ALL_PRODUCTS
            for _, median in matches(results, ROW.format(case, row, "milliseconds"))
        )
        for case in ("decode, int8, batch 1", "decode, float32, batch 1")
    ]
    return {"products": milliseconds[0] / milliseconds[1]}


LESS_TIME = [above(int8_over_float32, 0.75), below(int8_over_float32, 1)]
STATEMENTS = (
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
              [above(ROW.format("prefill, float32, chunk of 1,024", ATTENTION, "share_of_whole"),
                     0.5, sure=False)]),
    Statement(PAGE, "It reaches a smaller share of the FLOP limit than any product of the layers",
              "operations",
              [below(ROW.format("prefill, float32, chunk of 1,024", ATTENTION, "share_of_flops"),
                     ROW.format("prefill, float32, chunk of 1,024", row, "share_of_flops"))
               for row in PRODUCTS]),
    Statement(PAGE, "q, k and v are the slowest for their bytes", "operations",
              [below(ROW.format("decode, float32, batch 1", "q, k, v", "bytes_per_second"),
                     ROW.format("decode, float32, batch 1", row, "bytes_per_second"), sure=False)
               for row in ALL_PRODUCTS[1:]]),
)  # fmt: skip

if __name__ == "__main__":
    run_command(main)
