"""Hit rates of a prefix index on recorded requests: the index alone, without a model.

A trace is a file of Mooncake (block ids), of recorded agents (messages) or of Azure (lengths), or
`report`: the prompts of "Hashing Table Prefixing Implementation Report". Unless --cap is given, a
whole prompt may hit, as in the report and in the published replays.

Times include only calls of the index: hashing, admitting, publishing, releasing. Mooncake's ids are
looked up directly, one per block (--keys ids), or as 512 tokens derived from each (--keys tokens).
The hits are equal, but longer blocks take longer to hash. Azure publishes only lengths, so its
requests never hit.

`--record` measures all of evals/results/prefix_replay.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jaxkv.cli import CLOSED
from jaxkv.errors import UserError
from jaxkv.evals.prefix_caching import report, traces
from jaxkv.evals.prefix_caching.simulator import HASHINGS, MODES, ORDERS, Simulator
from jaxkv.serve.prefix import root_hash

PROGRAM = "python -m jaxkv.evals.prefix_caching.replay"
FAST = 300_000  # bar: block look-ups per second
BLOCK = 16  # default tokens per block
MOST = 10**7  # limit for the tokens of all prompts of the report's experiment
OF_REPORT = {
    "p": "chance of a frequent prompt", "frequent": "prompts; 1: all are the same",
    "concurrent": "requests that run at once", "length": "tokens of a prompt",
    "requests": "that come one after another", "greedy": "equal prompts, equal answers",
    "seed": "of all that is drawn",
}  # fmt: skip


def main() -> None:
    options = parse()
    try:
        if options.record:
            record(options)
            return
        results = replay_report(options) if options.trace == "report" else replay_file(options)
    except UserError as error:
        refuse(str(error))
    lines = json.dumps(results, indent=1).splitlines() if options.json else show(results)
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(CLOSED) from None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = refuse
    parser.add_argument("--trace", metavar="FILE", help="a file, or `report`")
    parser.add_argument("--capacity", type=blocks, default=None, metavar="BLOCKS|inf",
                        help="unused blocks that stay cached (default: inf)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--record", action="store_true", help="write the record; FILE is Mooncake's"
    )
    parser.add_argument("--agents", metavar="FILE", help="recorded agents, for the record")
    parser.add_argument(
        "--block", type=whole_number, help=f"tokens per block (default: {BLOCK}, Mooncake's 512)"
    )
    parser.add_argument("--mode", choices=MODES, help="handling of an incomplete block (default: "
                        "alias, of the report rekey)")  # fmt: skip
    parser.add_argument("--order", choices=ORDERS, help="eviction order (default: lru)")
    parser.add_argument("--cap", action="store_true", help="leave the last token to be computed")
    parser.add_argument(
        "--keys", choices=("ids", "tokens"), help="keys of Mooncake's blocks (default: ids)"
    )
    report_options = parser.add_argument_group("of the report")
    for name, about in OF_REPORT.items():
        default = getattr(report.ReplaySetting, name, 0)
        help = f"{about} (default: {default})"
        if name == "greedy":
            report_options.add_argument(f"--{name}", action="store_true", help=about)
        else:
            kind = {"p": share, "seed": partial(whole_number, minimum=0)}.get(name, whole_number)
            report_options.add_argument(f"--{name}", type=kind, metavar="N", help=help)
    options = parser.parse_args()
    if options.trace is None:
        parser.error("--trace must be given: a file, or report")
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Refuse flags without effect, and experiments that exceed the memory."""
    allowed = {"trace", "agents"} if options.record else set(vars(options)) - {"agents"}
    if options.trace != "report":
        allowed -= set(OF_REPORT)
    else:
        allowed -= {"keys"}
    for name, value in vars(options).items():
        if name not in allowed | {"record"} and value not in (None, False):
            refuse(f"--{name} changes nothing here, got {value}; leave it out")
    if options.trace != "report":
        return
    setting = setting_of(options)
    size = max(setting.frequent, setting.requests) * setting.length
    if size > MOST:
        refuse(f"prompts may have {MOST} tokens together, got {size}; give fewer or shorter ones")


def setting_of(options: argparse.Namespace) -> report.ReplaySetting:
    """The report's experiment as requested."""
    names = {field.name for field in fields(report.ReplaySetting)}
    values = {name: value for name, value in vars(options).items() if name in names}
    return report.ReplaySetting(**{k: v for k, v in values.items() if v is not None})


def refuse(message: str) -> NoReturn:
    """Exit with one line and code 2."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    raise SystemExit(2)


def whole_number(text: str, minimum: int = 1) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= minimum):
        rule = f"must be a whole number from {minimum} to 999999999"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r:.60}")
    return int(text)


def share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 1:
            return value
    raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text!r}")


def blocks(text: str) -> int | None:
    """A number of blocks; None for `inf`."""
    return None if text == "inf" else whole_number(text)


def show(results: dict[str, Any]) -> list[str]:
    return [f"{name}: {value}" for name, value in results.items()]


def replay_report(options: argparse.Namespace) -> dict[str, Any]:
    """One run of the report's experiment."""
    setting, seed = setting_of(options), options.seed or 0
    index, seconds = report.simulate(setting, seed)
    lookups = index.lookups
    rates = traces.ReplayResult(
        lookups.blocks, lookups.blocks_hit, lookups.tokens, lookups.tokens_hit, lookups.requests,
        lookups.requests_hit, index.evictions, lookups.missed, seconds,
    ).rates()  # fmt: skip
    return rates | {
        "trace": "report", "timed": "looking prompts up, not the tokens written",
        "mode": setting.mode, "block": setting.block, "capacity": named(options.capacity),
        "order": setting.order, "cap": setting.cap,
        "concurrent": setting.concurrent, "p": setting.p, "frequent": setting.frequent,
        "length": setting.length, "greedy": setting.greedy, "seed": seed,
        "requests": lookups.requests, "blocks": lookups.blocks,
        "tokens": lookups.tokens, "missed_tokens": lookups.missed,
    }  # fmt: skip


def replay_file(options: argparse.Namespace) -> dict[str, Any]:
    """One replay of a file."""
    trace = traces.read(Path(options.trace))
    if options.keys and trace.kind != "mooncake":
        raise UserError(f"--keys is for traces of Mooncake, got one of {trace.kind}; leave it out")
    by_ids = trace.kind == "mooncake" and options.keys != "tokens"
    order = options.order or "lru"
    if by_ids and (options.block or options.mode):
        raise UserError(
            "--block and --mode must be left out where ids are looked up as they stand, got "
            f"{options.block or options.mode}; add --keys tokens"
        )
    block, mode = options.block, options.mode or "alias"
    if trace.kind == "mooncake":
        block = block or traces.MOONCAKE_BLOCK
        prepare = traces.unchanged if by_ids else traces.expand_ids
    else:
        block, prepare = block or BLOCK, traces.unchanged
    result = traces.replay(
        trace, options.capacity, 1 if by_ids else block, "full" if by_ids else mode, order,
        options.cap, prepare,
    )  # fmt: skip
    return result.rates() | {
        "trace": trace.kind, "prefixes": PREFIXES[trace.kind],
        "timed": "ids" if by_ids else "tokens", "mode": mode, "block": block,
        "capacity": named(options.capacity), "order": order, "cap": options.cap,
        "requests": result.requests, "blocks": result.blocks, "tokens": result.tokens,
        "missed_blocks" if by_ids else "missed_tokens": result.missed,
        "look_ups_per_second": result.blocks / result.seconds,
    }  # fmt: skip


PREFIXES = {
    "mooncake": "as recorded: equal ids, equal prefix",
    "trajectories": "as recorded: a turn sends all before it again, sessions side by side",
    "azure": "none: the trace has lengths alone, so every prompt is taken as unlike all others",
}


def named(capacity: int | None) -> int | str:
    return "inf" if capacity is None else capacity


def record(options: argparse.Namespace) -> None:
    """Measure everything and write it."""
    from jaxkv.evals.lib.record import Record
    from jaxkv.evals.lib.timing import bar

    trace = traces.read(Path(options.trace))
    if trace.kind != "mooncake":
        raise UserError(f"the record needs a trace of Mooncake, got {options.trace}; give one")
    files = [Path(path) for path in (options.trace, options.agents) if path]
    run = Record("prefix_replay", files, seeds=range(10))
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
        result = traces.replay(trace, capacity)
        rates = result.rates()
        del rates["microseconds_per_block"]  # speed has its own rounds
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
        results["agents"] = agents(Path(options.agents))
    run.finish(results)


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
    from jaxkv.evals.lib.record import spread
    from jaxkv.evals.lib.timing import time_rounds, timed

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
        rates = traces.replay(trace, capacity, BLOCK, "alias", cap=True).rates()
        del rates["microseconds_per_block"]
        by_capacity[named(capacity)] = rates
    return by_capacity


if __name__ == "__main__":
    main()
