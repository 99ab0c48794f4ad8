"""Hit rates of the report's index on its own prompts and on recorded requests, without a model.

A whole prompt may hit, as in the report and in the published replays. Mooncake's ids are looked up
directly, one per block.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError
from jaxkv.evals.lib.record import spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import bar, time_rounds, timed
from jaxkv.evals.prefix_caching import report, traces
from jaxkv.evals.prefix_caching.simulator import HASHINGS, Simulator
from jaxkv.serve.prefix import root_hash

BLOCK = 16  # tokens per block
FLAGS = (flag("--trace", type=Path, required=True, about="a trace of Mooncake"),)


def measure(run: Run) -> dict[str, Any]:
    """The report's experiment, the replays of the trace, and the speed of both ways to hash."""
    options, trace = run.options, traces.read(run.options.trace)
    if trace.kind != "mooncake":
        raise UserError(f"--trace must be one of Mooncake, got {options.trace}; give one")
    run.record.about["seeds"] = list(range(10))
    results: dict[str, Any] = {
        "report": measure_report(),
        "mooncake": {},
        "snapshots": {},
        "bars": [],
    }
    for concurrent, (_, low, high) in report.TEN_SEEDS.items():
        mean = results["report"]["ten_seeds"][concurrent]["mean"]
        off = max(low - mean, mean - high, 0)
        beyond = "distance of the mean from the range of ten reference seeds"
        results["bars"].append(
            bar(f"report, {concurrent} concurrent requests: {beyond}", off, "<=", 0)
        )
    for capacity, reference in traces.MOONCAKE.items():
        rates = traces.replay(trace, capacity)
        results["mooncake"][named(capacity)] = rates | {"reference": reference}
        off = abs(rates["hit_rate_blocks"] - reference)
        name = f"Mooncake, {named(capacity)} blocks: error against the reference"
        results["bars"].append(bar(name, off, "<=", 0.0005))
    for where, references in traces.SNAPSHOTS.items():
        shares = [traces.replay_snapshots(trace, where, entries) for entries in traces.ENTRIES]
        results["snapshots"][where] = {
            named(entries): {"share": share, "reference": reference}
            for entries, share, reference in zip(traces.ENTRIES, shares, references, strict=True)
        }
        off = max(
            abs(share - reference) for share, reference in zip(shares, references, strict=True)
        )
        results["bars"].append(
            bar(f"snapshots, {where}: error against the reference", off, "<=", 0.01)
        )
    results["speed"] = {"microseconds_of_4096_tokens": hashing_times()}
    return results


def named(capacity: int | None) -> int | str:
    return "inf" if capacity is None else capacity


def measure_report() -> dict[str, Any]:
    """The report's experiment, in every setting of the reference."""
    base, one_prompt = report.ReplaySetting(), report.ONE_PROMPT
    measure, results = report.measure, {}
    results["ten_seeds"] = {
        concurrent: measure(replace(one_prompt, concurrent=concurrent), 10)
        | {"closed_form": report.closed_form(concurrent), "reference": reference}
        for concurrent, reference in report.TEN_SEEDS.items()
    }
    index = f"{one_prompt.mode}, block {one_prompt.block}"
    results["identical"] = {index: {one_prompt.concurrent: measure(one_prompt)}}
    results["curves"] = {
        f"{mode}, block {block}, {concurrent} at a time": {
            p: measure(replace(base, mode=mode, block=block, concurrent=concurrent, p=p))
            | {"reference": reference}
            for p, reference in zip(report.SHARES, row, strict=True)
        }
        for (mode, block, concurrent), row in report.CURVES.items()
    }
    # Six tokens; the report has 8.14 %.
    results["what_is_your_name"] = {index: measure(replace(one_prompt, length=6), 5)}
    results["greedy"] = measure(replace(one_prompt, greedy=True))
    return results


def hashing_times() -> dict[str, dict[str, float]]:
    """Microseconds to hash a long prompt, by the way to hash."""
    prompt, name = list(range(4096)), root_hash()
    indexes = {how: Simulator(BLOCK, mode="full", hashing=how) for how in HASHINGS}
    times = time_rounds(
        {
            how: timed(lambda index=index: index.hash_prompt(prompt, name))
            for how, index in indexes.items()
        },
        21, "hashing",
    )  # fmt: skip
    return {how: spread([1e6 * seconds for seconds in took]) for how, took in times.items()}


MEASURE = Measure("prefix_replay", measure, FLAGS, data=lambda options: [options.trace])

if __name__ == "__main__":
    run(MEASURE)
