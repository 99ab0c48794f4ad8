"""Tokens a second of one model under each policy: prefill and decoding, on any device.

A prompt of random tokens is read, then every sequence of the batch generates. All policies
alternate in one process. `full` is full attention, whose cache holds the prompt and the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from jaxkv import models
from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import page_table, table_head, table_row
from jaxkv.evals.lib.timing import decode_after_prompt, prompt, rate, time_rounds, timed
from jaxkv.evals.lib.verdict import Statement, below
from jaxkv.models.loading.llm import Llm

POLICIES = {
    "full": "full",
    "window": "window:window=256",
    "streaming": "streaming:sinks=4,window=252",
    "reservoir": "reservoir:sinks=4,window=124,sample=128",
    "balance-stream": "balance-stream:sinks=4,window=124,levels=3,block=64",
    "snapkv": "snapkv:capacity=256",
    "magicpig": "magicpig",
}
BATCHES, PROMPT, NEW = (1, 32), 2_048, 128


FLAGS = (
    flag("--model", "smollm2-135m", "a model folder, GGUF file or Hub id"),
    flag("--dtype", about="default: by device and file"),
    flag("--policies", tuple(POLICIES), choices=POLICIES),
    flag("--batches", BATCHES, minimum=1),
    flag("--prompt", PROMPT, "tokens", minimum=1),
    flag("--rounds", 7, "of each measurement", minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """The rates by batch size."""
    options = run.options
    llm = models.load(options.model, options.dtype)
    run.record.add(llm.files)
    if options.quick:
        options.prompt, options.batches, options.rounds = 300, (1, 2), 1
    by_batch = {
        f"batch {batch}": rates(llm, options.policies, batch, options.prompt, options.rounds)
        for batch in options.batches
    }
    return {"model": llm.name, "dtype": llm.dtype} | by_batch


def rates(
    llm: Llm, policies: Sequence[str], batch: int, length: int, rounds: int, new: int = NEW
) -> dict[str, Any]:
    """Tokens a second of all sequences together, by policy."""
    prompts = [prompt(llm, length, seed) for seed in range(batch)]
    decodes = {
        name: decode_after_prompt(llm, POLICIES[name], length, new, batch) for name in policies
    }
    reads = {
        name: timed(partial(prefill, llm, POLICIES[name], prompts, length + new))
        for name in policies
    }
    seconds = time_rounds(reads, rounds, f"prefill, batch {batch}")
    prefill_rates = {name: rate(batch * length, values) for name, values in seconds.items()}
    seconds = time_rounds(decodes, rounds, f"decoding, batch {batch}")
    decoding = {name: rate(batch * new, values) for name, values in seconds.items()}
    by_policy = {
        name: {
            "prefill": prefill_rates[name],
            "decoding": decoding[name],
            "step_milliseconds": spread([1e3 * s / new for s in seconds[name]]),
        }
        for name in policies
    }
    for name, row in by_policy.items():
        print(f"batch {batch}, {name}: prefill {row['prefill']['median']:,.0f}, decoding "
              f"{row['decoding']['median']:,.0f} tokens a second", flush=True)  # fmt: skip
    return {"prompt": length, "new": new, "policies": by_policy}


def prefill(llm: Llm, policy: str, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    stream = models.Stream(llm, policy, len(prompts), tokens=tokens)
    stream.prefill(prompts)
    stream.finish_prefill()
    jax.block_until_ready(stream.decoding)


def table() -> str:
    """Tokens a second on a GPU by policy: medians."""
    record = read("rates_gpu")
    results, gpu = record["results"], record["device"].partition(": ")[2]
    single = results["batch 1"]
    rounds = single["policies"]["full"]["decoding"]["n"]
    lines = [
        f"{results['model']} in {results['dtype']} on {gpu}, one sequence, a prompt of "
        f"{single['prompt']:,} tokens, tokens a second (medians of {rounds} rounds):",
        "",
        *table_head("policy", "prefill", "decoding"),
    ]
    for name, row in single["policies"].items():
        cells = (f"{row[phase]['median']:,.0f}" for phase in ("prefill", "decoding"))
        lines.append(table_row(f"`{name}`", *cells))
    return page_table(lines)


TABLES = {"rates_gpu": table}
STATEMENTS = (
    Statement("ACCELERATOR.md", "`balance-stream` decodes slowest", "rates_gpu",
              [below("batch 1/policies/balance-stream/decoding",
                     f"batch 1/policies/{name}/decoding")
               for name in POLICIES if name not in ("balance-stream", "magicpig")]),
)  # fmt: skip


MEASURE = Measure(lambda _: f"rates_{jax.default_backend()}", measure, FLAGS)

if __name__ == "__main__":
    run(MEASURE)
