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
from jaxkv.prefix import BlockHasher
from jaxkv.prefix.block_hash import root_hash
from jaxkv.prefix.blocks import MODES
from jaxkv.prefix.eviction import ORDERS

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
    given = parse()
    try:
        if given.record:
            record(given)
            return
        found = replay_report(given) if given.trace == "report" else replay_file(given)
    except UserError as error:
        refuse(str(error))
    lines = json.dumps(found, indent=1).splitlines() if given.json else show(found)
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(CLOSED) from None


def parse() -> argparse.Namespace:
    ask = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.error = refuse
    ask.add_argument("--trace", metavar="FILE", help="a file, or `report`")
    ask.add_argument("--capacity", type=blocks, default=None, metavar="BLOCKS|inf",
                     help="unused blocks that stay cached (default: inf)")  # fmt: skip
    ask.add_argument("--json", action="store_true", help="print JSON")
    ask.add_argument("--record", action="store_true", help="write the record; FILE is Mooncake's")
    ask.add_argument("--agents", metavar="FILE", help="recorded agents, for the record")
    ask.add_argument(
        "--block", type=whole_number, help=f"tokens per block (default: {BLOCK}, Mooncake's 512)"
    )
    ask.add_argument("--mode", choices=MODES, help="handling of an incomplete block (default: "
                     "alias, of the report rekey)")  # fmt: skip
    ask.add_argument("--order", choices=ORDERS, help="eviction order (default: lru)")
    ask.add_argument("--cap", action="store_true", help="leave the last token to be computed")
    ask.add_argument(
        "--keys", choices=("ids", "tokens"), help="keys of Mooncake's blocks (default: ids)"
    )
    options = ask.add_argument_group("of the report")
    for name, about in OF_REPORT.items():
        default = getattr(report.ReplaySetting, name, 0)
        help = f"{about} (default: {default})"
        if name == "greedy":
            options.add_argument(f"--{name}", action="store_true", help=about)
        else:
            kind = {"p": share, "seed": partial(whole_number, least=0)}.get(name, whole_number)
            options.add_argument(f"--{name}", type=kind, metavar="N", help=help)
    given = ask.parse_args()
    if given.trace is None:
        ask.error("--trace must be given: a file, or report")
    check(given)
    return given


def check(given: argparse.Namespace) -> None:
    """Refuse flags without effect, and experiments that exceed the memory."""
    here = {"trace", "agents"} if given.record else set(vars(given)) - {"agents"}
    if given.trace != "report":
        here -= set(OF_REPORT)
    else:
        here -= {"keys"}
    for name, value in vars(given).items():
        if name not in here | {"record"} and value not in (None, False):
            refuse(f"--{name} changes nothing here, got {value}; leave it out")
    if given.trace != "report":
        return
    setting = setting_of(given)
    size = max(setting.frequent, setting.requests) * setting.length
    if size > MOST:
        refuse(f"prompts may have {MOST} tokens together, got {size}; give fewer or shorter ones")


def setting_of(given: argparse.Namespace) -> report.ReplaySetting:
    """The report's experiment as requested."""
    names = {field.name for field in fields(report.ReplaySetting)}
    given_fields = {name: value for name, value in vars(given).items() if name in names}
    return report.ReplaySetting(**{k: v for k, v in given_fields.items() if v is not None})


def refuse(message: str) -> NoReturn:
    """Exit with one line and code 2."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    raise SystemExit(2)


def whole_number(text: str, least: int = 1) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        rule = f"must be a whole number from {least} to 999999999"
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


def show(found: dict[str, Any]) -> list[str]:
    return [f"{name}: {value}" for name, value in found.items()]


def replay_report(given: argparse.Namespace) -> dict[str, Any]:
    """One run of the report's experiment."""
    setting, seed = setting_of(given), given.seed or 0
    counts, seconds = report.simulate(setting, seed)
    found = counts.lookups
    rates = traces.ReplayResult(
        found.blocks, found.blocks_hit, found.tokens, found.tokens_hit, found.requests,
        found.requests_hit, counts.evictions, found.missed, seconds,
    ).rates()  # fmt: skip
    return rates | {
        "trace": "report", "timed": "looking prompts up, not the tokens written",
        "mode": setting.mode, "block": setting.block, "capacity": named(given.capacity),
        "order": setting.order, "cap": setting.cap,
        "concurrent": setting.concurrent, "p": setting.p, "frequent": setting.frequent,
        "length": setting.length, "greedy": setting.greedy, "seed": seed,
        "requests": found.requests, "blocks": found.blocks,
        "tokens": found.tokens, "missed_tokens": found.missed,
    }  # fmt: skip


def replay_file(given: argparse.Namespace) -> dict[str, Any]:
    """One replay of a file."""
    trace = traces.read(Path(given.trace))
    if given.keys and trace.kind != "mooncake":
        raise UserError(f"--keys is for traces of Mooncake, got one of {trace.kind}; leave it out")
    by_ids = trace.kind == "mooncake" and given.keys != "tokens"
    order = given.order or "lru"
    if by_ids and (given.block or given.mode):
        raise UserError(
            "--block and --mode must be left out where ids are looked up as they stand, got "
            f"{given.block or given.mode}; add --keys tokens"
        )
    block, mode = given.block, given.mode or "alias"
    if trace.kind == "mooncake":
        block = block or traces.MOONCAKE_BLOCK
        prepare = traces.unchanged if by_ids else traces.expand_ids
    else:
        block, prepare = block or BLOCK, traces.unchanged
    found = traces.replay(
        trace, given.capacity, 1 if by_ids else block, "full" if by_ids else mode, order,
        given.cap, prepare,
    )  # fmt: skip
    return found.rates() | {
        "trace": trace.kind, "prefixes": PREFIXES[trace.kind],
        "timed": "ids" if by_ids else "tokens", "mode": mode, "block": block,
        "capacity": named(given.capacity), "order": order, "cap": given.cap,
        "requests": found.requests, "blocks": found.blocks, "tokens": found.tokens,
        "missed_blocks" if by_ids else "missed_tokens": found.missed,
        "look_ups_per_second": found.blocks / found.seconds,
    }  # fmt: skip


PREFIXES = {
    "mooncake": "as recorded: equal ids, equal prefix",
    "trajectories": "as recorded: a turn sends all before it again, sessions side by side",
    "azure": "none: the trace has lengths alone, so every prompt is taken as unlike all others",
}


def named(capacity: int | None) -> int | str:
    return "inf" if capacity is None else capacity


def record(given: argparse.Namespace) -> None:
    """Measure everything and write it."""
    from jaxkv.evals.lib.record import Record
    from jaxkv.evals.lib.timing import bar

    trace = traces.read(Path(given.trace))
    if trace.kind != "mooncake":
        raise UserError(f"the record needs a trace of Mooncake, got {given.trace}; give one")
    files = [Path(path) for path in (given.trace, given.agents) if path]
    run = Record("prefix_replay", files, seeds=range(10))
    results: dict[str, Any] = {
        "report": measure_report(),
        "mooncake": {},
        "snapshots": {},
        "bars": [],
    }
    for concurrent, (_, least, most) in report.TEN_SEEDS.items():
        mean = results["report"]["ten_seeds"][concurrent]["mean"]
        off = max(least - mean, mean - most, 0)
        beyond = "distance of the mean from the range of ten reference seeds"
        results["bars"].append(
            bar(f"report, {concurrent} concurrent requests: {beyond}", off, "<=", 0)
        )
    for capacity, wanted in traces.MOONCAKE.items():
        found = traces.replay(trace, capacity)
        rates = found.rates()
        del rates["microseconds_per_block"]  # speed has its own rounds
        results["mooncake"][named(capacity)] = rates | {"reference": wanted}
        off = abs(rates["hit_rate_blocks"] - wanted)
        name = f"Mooncake, {named(capacity)} blocks: error against the reference"
        results["bars"].append(bar(name, off, "<=", 0.0005))
    for where, wanted in traces.SNAPSHOTS.items():
        shares = [traces.replay_snapshots(trace, where, entries) for entries in traces.ENTRIES]
        results["snapshots"][where] = {
            named(entries): {"share": share, "reference": reference}
            for entries, share, reference in zip(traces.ENTRIES, shares, wanted, strict=True)
        }
        off = max(abs(share - reference) for share, reference in zip(shares, wanted, strict=True))
        results["bars"].append(
            bar(f"snapshots, {where}: error against the reference", off, "<=", 0.01)
        )
    results["speed"] = speed(trace)
    for keys in ("ids", "tokens"):
        slowest = min(results["speed"][keys].values(), key=lambda each: each["median"])
        results["bars"].append(bar(f"block look-ups per second, by {keys}", slowest, ">=", FAST))
    if given.agents:
        results["agents"] = agents(Path(given.agents))
    run.finish(results)


def measure_report() -> dict[str, Any]:
    """The report's experiment, in every setting of the reference."""
    base, one = report.ReplaySetting(), report.ONE_PROMPT
    measure, found = report.measure, {}
    found["ten_seeds"] = {
        concurrent: measure(replace(one, concurrent=concurrent), 10)
        | {"closed_form": report.closed_form(concurrent), "reference": reference}
        for concurrent, reference in report.TEN_SEEDS.items()
    }
    found["identical"] = {
        f"{mode}, block {block}": {
            concurrent: measure(replace(one, mode=mode, block=block, concurrent=concurrent))
            | {"reference": reference}
            for concurrent, reference in row.items()
        }
        for (mode, block), row in report.IDENTICAL.items()
    }
    found["curves"] = {
        f"{mode}, block {block}, {concurrent} at a time": {
            p: measure(replace(base, mode=mode, block=block, concurrent=concurrent, p=p))
            | {"reference": reference}
            for p, reference in zip(report.SHARES, row, strict=True)
        }
        for (mode, block, concurrent), row in report.CURVES.items()
    }
    found["pools"] = {
        f"{mode}, block {block}": {
            capacity: measure(replace(base, mode=mode, block=block, p=0.5, capacity=capacity))
            | {"reference": reference}
            for capacity, reference in row.items()
        }
        for (mode, block), row in report.POOLS.items()
    }
    found["what_is_your_name"] = {  # six tokens; the report has 8.14 %
        f"{mode}, block {block}": measure(replace(one, mode=mode, block=block, length=6), 5)
        for mode in ("rekey", "full") for block in (16, 8, 4)
    }  # fmt: skip
    found["greedy"] = measure(replace(one, greedy=True))
    found["equal_outputs"] = {
        concurrent: measure(replace(one, concurrent=concurrent, outputs=(112, 112)))
        for concurrent in (4, 16, 64)
    }
    return found


def speed(trace: traces.Trace, count: int = 5) -> dict[str, Any]:
    """Block look-ups per second by ids and by tokens, and microseconds to hash a long prompt."""
    from jaxkv.evals.lib.record import spread
    from jaxkv.evals.lib.timing import time_rounds, timed

    def rate(capacity: int | None, by_tokens: bool) -> float:
        block, mode = (traces.MOONCAKE_BLOCK, "alias") if by_tokens else (1, "full")
        prepare = traces.expand_ids if by_tokens else traces.unchanged
        found = traces.replay(trace, capacity, block, mode, prepare=prepare)
        return found.blocks / found.seconds

    prompt, name = list(range(4096)), root_hash()
    read = {how: BlockHasher(BLOCK, how) for how in ("chained", "direct")}
    hashing = time_rounds(
        {
            how: timed(lambda chain=chain: chain.hash_prompt(prompt, name))
            for how, chain in read.items()
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
            how: spread([1e6 * one for one in took]) for how, took in hashing.items()
        },
    }


def agents(path: Path) -> dict[str, Any]:
    """Recorded sessions in blocks of 16 tokens; the last token is always computed."""
    trace = traces.read(path)
    found = {}
    for capacity in (1_000, 10_000, None):
        rates = traces.replay(trace, capacity, BLOCK, "alias", cap=True).rates()
        del rates["microseconds_per_block"]
        found[named(capacity)] = rates
    return found


if __name__ == "__main__":
    main()
