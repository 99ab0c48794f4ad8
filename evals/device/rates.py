"""Tokens a second of three sizes of model on this device, by policy, beside transformers.

Weights are random, in bfloat16, at the shapes of SmolLM2-135M, Llama-3.2-1B and Llama-3.1-8B.
Prefill of a prompt, then decoding, alone and in a batch; every case is a part that is stored, so a
run that time cuts short continues. transformers runs the same shapes, and decodes with a static
cache. `magicpig` is read by name only: on a GPU its decoding was so slow that a run was stopped,
and its new form has not run yet.

The record `rates_gpu` has SmolLM2-135M with its weights; the commit of the record has its command.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError
from jaxkv.evals.benchmarks.compiled_worker import COMMON, MODELS, config_of
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import page_table, table_head, table_row
from jaxkv.evals.lib.timing import Variant, bar, decode_after_prompt, prompt, timed
from jaxkv.evals.lib.verdict import Statement, below
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.weight_names import shapes

PEER = "transformers"
POLICIES = {
    "full": "full",
    "window": "window:window=256",
    "streaming": "streaming:sinks=4,window=252",
    "reservoir": "reservoir:sinks=4,window=124,sample=128",
    "balance-stream": "balance-stream:sinks=4,window=124,levels=3,block=64",
    "snapkv": "snapkv:capacity=256",
    "magicpig": "magicpig",
}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
FASTEST = {
    ("SmolLM2-135M", "streaming", "decode 1 x 2048"): 1_600,
    ("SmolLM2-135M", "streaming", "prefill 1 x 2048"): 150_000,
}  # tokens a second, on an H100


class DeviceCase(NamedTuple):
    """phase: prefill or decode. batch, length: of the prompts."""

    model: str
    policy: str
    phase: str
    batch: int
    length: int

    @property
    def title(self) -> str:
        return f"{self.phase} {self.batch} x {self.length}"


FLAGS = (
    flag("--models", tuple(MODELS), choices=MODELS),
    flag("--policies", (PEER, "full", "streaming", "reservoir", "balance-stream"),
         choices=(PEER, *POLICIES)),
    flag("--lengths", (2_048, 16_384), "tokens of a prompt", minimum=2),
    flag("--batches", (1, 32), "sequences in decoding", minimum=1),
    flag("--new", 128, "tokens", minimum=2),
    flag("--rounds", 5, minimum=1),
    flag("--minutes", 8.0, "until no further case begins"),
)  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    """Tokens a second by model, policy and case."""
    options, deadline = run.options, time.monotonic() + 60 * run.options.minutes
    cases = list(cases_of(options))
    parts = Parts(run.record, len(cases))
    models: dict[str, Llm] = {}
    rates: dict[str, Any] = {}
    for case in cases:
        name = part_name(case, options)
        if time.monotonic() > deadline and not (parts.folder / f"{name}.npz").exists():
            raise UserError(
                f"{parts.done} of {len(cases)} cases are done after {options.minutes:g} minutes; "
                "the same command continues"
            )
        compute = partial(seconds_of, case, models, options)
        seconds = parts.part(name, compute)
        tokens = case.batch * (case.length if case.phase == "prefill" else options.new)
        by_policy = rates.setdefault(case.model, {}).setdefault(case.policy, {})
        by_policy[case.title] = spread(tokens / seconds)
    bars = [
        bar(f"{model}, {policy}, {title}: tokens a second", rates[model][policy][title], ">=", rate)
        for (model, policy, title), rate in FASTEST.items()
        if title in rates.get(model, {}).get(policy, {})
    ]
    return {"new": options.new, "rates": rates, "bars": bars, "commits": parts.commits}


def cases_of(options: Any) -> Iterable[DeviceCase]:
    """The cases in order: single sequences of all models before batches."""
    for model in options.models:
        for policy in options.policies:
            for length in options.lengths:
                yield DeviceCase(model, policy, "prefill", 1, length)
            yield DeviceCase(model, policy, "decode", 1, options.lengths[0])
    for batch in options.batches:
        for model in options.models if batch > 1 else ():
            for policy in options.policies:
                yield DeviceCase(model, policy, "decode", batch, options.lengths[0])


def part_name(case: DeviceCase, options: Any) -> str:
    """All that the seconds of a case depend on."""
    device = jax.local_devices()[0].device_kind
    about = (device, f"{options.new} new", f"{options.rounds} rounds", *case)
    return ", ".join(map(str, about)) + ", tiny" * options.quick


def seconds_of(case: DeviceCase, models: dict[str, Llm], options: Any) -> np.ndarray:
    """The seconds of each round."""
    if case.policy == PEER:
        return transformers_seconds(case, options)
    if case.model not in models:
        models.clear()  # one model is in memory at a time
        models[case.model] = random_model(case.model, options.quick)
    llm, policy = models[case.model], POLICIES[case.policy]
    if case.phase == "decode":
        work = decode_after_prompt(llm, policy, case.length, options.new, case.batch)
        return seconds_of_rounds(work, options.rounds)
    prompts = [prompt(llm, case.length, seed) for seed in range(case.batch)]
    read = partial(prefill, llm, policy, prompts, case.length + options.new)
    return seconds_of_rounds(timed(read), options.rounds)


def prefill(llm: Llm, policy: str, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    stream = Stream(llm, policy, len(prompts), tokens=tokens)
    stream.prefill(prompts)
    stream.finish_prefill()
    jax.block_until_ready(stream.decoding)


def seconds_of_rounds(variant: Variant, rounds: int) -> np.ndarray:
    """The seconds of each round, after one that compiles."""
    variant()
    return np.array([variant() for _ in range(rounds)])


def random_model(name: str, quick: bool) -> Llm:
    """A model of these shapes with random weights."""
    config = config_of(name, **(TINY if quick else {}))
    rng = jax.random.key(0)
    weights = {}
    for number, (weight, (_, shape)) in enumerate(shapes(config).items()):
        draw = jax.random.normal(jax.random.fold_in(rng, number), shape, jnp.bfloat16)
        weights[weight] = jnp.ones(shape, jnp.bfloat16) if len(shape) == 1 else draw * 0.02
    return Llm(config, weights, None, None, Path(name), "bfloat16")


def transformers_seconds(case: DeviceCase, options: Any) -> np.ndarray:
    """The same of transformers: a forward pass, or greedy `generate` with a static cache."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = COMMON | MODELS[case.model] | (TINY if options.quick else {})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # in float32, 8B would not fit beside JAX's memory
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**fields)).eval()
        ids = torch.randint(3, fields["vocab_size"], (case.batch, case.length))
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None

    def read() -> None:
        with torch.inference_mode():
            model(ids, use_cache=True, logits_to_keep=1)
        synchronise()

    def write(new: int) -> None:
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                           cache_implementation="static", pad_token_id=0)  # fmt: skip
        synchronise()

    if case.phase == "prefill":
        return seconds_of_rounds(timed(read), options.rounds)
    first, all_tokens = (
        seconds_of_rounds(timed(partial(write, new)), options.rounds)
        for new in (1, options.new + 1)
    )
    return all_tokens - first


def rates_table() -> str:
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


TABLES = {"rates_gpu": rates_table}
STATEMENTS = (
    Statement("ACCELERATOR.md", "`balance-stream` decodes slowest", "rates_gpu",
              [below("batch 1/policies/balance-stream/decoding",
                     f"batch 1/policies/{name}/decoding")
               for name in POLICIES if name not in ("balance-stream", "magicpig")]),
)  # fmt: skip
MEASURE = Measure("device_rates", measure, FLAGS)

if __name__ == "__main__":
    run(MEASURE)
