"""Hit rates of the report's index on its own prompts and on recorded requests, without a model.

A whole prompt may hit, as in the report and in the published replays, but for recorded agents.
Times include only calls of the index: hashing, admitting, publishing, releasing. Mooncake's ids are
looked up directly, one per block, or as 512 tokens derived from each. The hits are equal, but
longer blocks take longer to hash.
"""

from __future__ import annotations

from argparse import Namespace
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

FAST = 300_000  # bar: block look-ups per second
BLOCK = 16  # tokens per block
FLAGS = (
    flag("--trace", type=Path, required=True, about="a trace of Mooncake"),
    flag("--agents", type=Path, about="recorded agents"),
)


def files(options: Namespace) -> list[Path]:
    return [path for path in (options.trace, options.agents) if path]


def measure(run: Run) -> dict[str, Any]:
    """The report's experiment, the replays of both traces, and the speed of the index."""
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
        rates = traces.replay(trace, capacity).rates()
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
    results["speed"] = speed(trace)
    for keys in ("ids", "tokens"):
        slowest = min(results["speed"][keys].values(), key=lambda spread: spread["median"])
        results["bars"].append(bar(f"block look-ups per second, by {keys}", slowest, ">=", FAST))
    if options.agents:
        results["agents"] = agents(options.agents)
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
    results["identical"] = {
        f"{mode}, block {block}": {
            concurrent: measure(replace(one_prompt, mode=mode, block=block, concurrent=concurrent))
            | {"reference": reference}
            for concurrent, reference in row.items()
        }
        for (mode, block), row in report.IDENTICAL.items()
    }
    results["curves"] = {
        f"{mode}, block {block}, {concurrent} at a time": {
            p: measure(replace(base, mode=mode, block=block, concurrent=concurrent, p=p))
            | {"reference": reference}
            for p, reference in zip(report.SHARES, row, strict=True)
        }
        for (mode, block, concurrent), row in report.CURVES.items()
    }
    results["pools"] = {
        f"{mode}, block {block}": {
            capacity: measure(replace(base, mode=mode, block=block, p=0.5, capacity=capacity))
            | {"reference": reference}
            for capacity, reference in row.items()
        }
        for (mode, block), row in report.POOLS.items()
    }
    results["what_is_your_name"] = {  # six tokens; the report has 8.14 %
        f"{mode}, block {block}": measure(replace(one_prompt, mode=mode, block=block, length=6), 5)
        for mode in ("rekey", "full") for block in (16, 8, 4)
    }  # fmt: skip
    results["greedy"] = measure(replace(one_prompt, greedy=True))
    results["equal_outputs"] = {
        concurrent: measure(replace(one_prompt, concurrent=concurrent, outputs=(112, 112)))
        for concurrent in (4, 16, 64)
    }
    return results


def speed(trace: traces.Trace, count: int = 5) -> dict[str, Any]:
    """Block look-ups per second by ids and by tokens, and microseconds to hash a long prompt."""

    def rate(capacity: int | None, by_tokens: bool) -> float:
        block, mode = (traces.MOONCAKE_BLOCK, "alias") if by_tokens else (1, "full")
        prepare = traces.expand_ids if by_tokens else traces.unchanged
        result = traces.replay(trace, capacity, block, mode, prepare=prepare)
        return result.blocks / result.seconds

    prompt, name = list(range(4096)), root_hash()
    read = {how: Simulator(BLOCK, mode="full", hashing=how) for how in HASHINGS}
    hashing = time_rounds(
        {
            how: timed(lambda index=index: index.hash_prompt(prompt, name))
            for how, index in read.items()
        },
        21, "hashing",
    )  # fmt: skip
    return {
        **{
            path: {
                named(capacity): spread([rate(capacity, path == "tokens") for _ in range(count)])
                for capacity in traces.MOONCAKE
            }
            for path in ("ids", "tokens")
        },
        "microseconds_of_4096_tokens": {
            how: spread([1e6 * seconds for seconds in took]) for how, took in hashing.items()
        },
    }


def agents(path: Path) -> dict[str, Any]:
    """Recorded sessions in blocks of 16 tokens; the last token is always computed."""
    trace = traces.read(path)
    by_capacity = {}
    for capacity in (1_000, 10_000, None):
        replayed = traces.replay(trace, capacity, BLOCK, "alias", cap=True)
        by_capacity[named(capacity)] = replayed.rates()
    return by_capacity


MEASURE = Measure("prefix_replay", measure, FLAGS, data=files)

if __name__ == "__main__":
    run(MEASURE)
