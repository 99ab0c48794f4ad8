"""`jaxkv serve` beside transformers' server, on the same weights of SmolLM2-135M-Instruct.

Both have the dequantised weights of the GGUF file in float32. transformers runs in an environment
of its own:

    python -m venv PEERS && PEERS/bin/pip install torch "transformers[serving]==5.24.*" accelerate
    python -m jaxkv.evals.benchmarks.servers --peer-python PEERS/bin/python

All servers are loaded at once and take turns, measurement by measurement and round by round; only
one gets requests at a time, on loopback. Every answer is greedy and streamed, and has a fixed
number of tokens: `ignore_eos` at jaxkv, and transformers' folder names no EOS. Tokens are those of
`usage`. The defaults of each server apply, but for `--fixed-batch` where it is named, and for the
share of the machine's memory that transformers' continuous batching takes for its cache
(`--cb-memory`; its default of 60 % would leave too little for the others).

`tokens_per_second`: by the number of clients that ask at once. `first_text`: seconds of each turn
of a chat whose requests contain the whole conversation. `gap`: seconds between two chunks of a
stream, the 99th percentile, while nothing else runs and while four long prompts arrive; the third
number is when all prompts are answered. Without continuous batching, transformers' server answers
one request after another, so prompts wait for the stream and do not stall it. `answer`: the
beginning of one answer, which shows that the servers have the same model. `memory`: resident bytes
when the server is loaded and at the end, with the peak until then. What fails has its reason in
place of a number. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv import defaults, models
from jaxkv.evals.benchmarks import server_requests as requests
from jaxkv.evals.benchmarks.rates_llama_cpp import memory
from jaxkv.evals.benchmarks.server_requests import FAILURES, Measurement, Result, Target
from jaxkv.evals.benchmarks.weights import add_chat, as_folder
from jaxkv.evals.lib.record import Record, make_parser, read, run_command, spread
from jaxkv.evals.lib.table import page_table, table_head, table_row
from jaxkv.evals.lib.text import PASSAGE
from jaxkv.evals.lib.verdict import Statement, above
from jaxkv.models.loading import smollm2
from jaxkv.state.memory import show

OURS = [sys.executable, "-m", "jaxkv.cli", "serve", "--dtype", "float32"]
CASES = {
    "jaxkv, full": ["--policy", "full"],
    "jaxkv, default policy": ["--policy", defaults.POLICY],
    "jaxkv, fixed batch": ["--policy", defaults.POLICY, "--fixed-batch"],
}
THEIRS = ["-P", "-m", "transformers.cli.transformers", "serve"]
FLAGS = ["--device", "cpu", "--dtype", "float32", "--log-level", "error"]
ABOUT = (
    "import json, torch, transformers as t; print(json.dumps([t.__version__, torch.__version__]))"
)
START, STOP = 900.0, 30.0  # seconds in which a server must start, and end


class Failed(NamedTuple):
    """Why there is no measurement."""

    reason: str


class RunningServer(NamedTuple):
    process: subprocess.Popen[bytes]
    target: Target
    memory: dict[str, int]  # when it was loaded


def main() -> None:
    parser = make_parser("jaxkv.evals.benchmarks.servers", __doc__)
    parser.add_argument("--peer-python", required=True, help="the Python that has transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument(
        "--cb-memory", type=float, default=0.2, help="share of the machine's memory"
    )
    parser.add_argument("--quick", action="store_true", help="small numbers, into out/")
    options = parser.parse_args()
    if options.rounds < 1 or min(options.clients) < 1 or not 0 < options.cb_memory < 1:
        parser.error(
            "--rounds and --clients must be 1 or more and --cb-memory between 0 and 1, got "
            f"{options.rounds}, {options.clients} and {options.cb_memory}"
        )
    if options.quick:
        options.rounds, options.clients = 1, [1, 4]
    record = Record("servers", [smollm2.fetch(), PASSAGE], quick=options.quick)
    record.finish(run(options))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start all servers, measure and end them."""
    sizes = requests.QUICK if options.quick else requests.RequestSizes()
    versions = subprocess.run([options.peer_python, "-P", "-c", ABOUT], stdout=subprocess.PIPE)
    if versions.returncode:
        raise SystemExit(f"{options.peer_python} cannot import torch and transformers, as above")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        llm = models.load(smollm2.NAME, dtype="float32")
        add_chat(llm, as_folder(llm, folder))
        del llm
        cases: dict[str, RunningServer | Failed] = {}
        for name, (command, fields) in commands(options, folder).items():
            start = time.perf_counter()
            try:
                cases[name] = stack.enter_context(started(command, fields))
            except FAILURES as error:
                cases[name] = failed(error)
            progress(f"start, {name}", start, cases[name])
        results = measure(cases, requests.measurements(options.clients, sizes), options.rounds)
    named = dict(zip(("transformers", "torch"), json.loads(versions.stdout), strict=True))
    return {
        "model": smollm2.NAME, "jaxkv": CASES, "rounds": options.rounds,
        "sizes": sizes._asdict(), "peer": named | {"cb_memory": options.cb_memory},
        "cases": results,
    }  # fmt: skip


def commands(
    options: argparse.Namespace, folder: Path
) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """The command of each server without its port, and the fields that its requests need."""
    jaxkv_fields = {"model": smollm2.NAME, "ignore_eos": True}
    transformers_command, fields = (
        [options.peer_python, *THEIRS, str(folder), *FLAGS],
        {"model": str(folder)},
    )
    batching = ["--continuous-batching", "--cb-max-memory-percent", str(options.cb_memory)]
    return {
        name: ([*OURS, "--model", smollm2.NAME, *flags], jaxkv_fields)
        for name, flags in CASES.items()
    } | {
        "transformers, default": (transformers_command, fields),
        "transformers, continuous batching": ([*transformers_command, *batching], fields),
    }


@contextmanager
def started(command: Sequence[str], fields: Mapping[str, Any]) -> Iterator[RunningServer]:
    """A server that answers, ended on exit; raises RuntimeError where it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        try:
            until = time.monotonic() + START
            while not is_healthy(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    last = log.read().decode(errors="replace").strip().splitlines()[-1:]
                    raise RuntimeError(f"the server does not start: {' '.join(last)[:200]}")
                time.sleep(0.1)
            yield RunningServer(process, Target(port, fields), memory(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_healthy(port: int) -> bool:
    with suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        finally:
            connection.close()
    return False


def measure(
    cases: Mapping[str, RunningServer | Failed], work: Mapping[str, Measurement], rounds: int
) -> dict[str, Any]:
    """All measurements of all servers in turn, after a warm-up request to each."""
    running = {name: case for name, case in cases.items() if isinstance(case, RunningServer)}
    results: dict[str, dict[str, list[Result]]] = {
        name: {at: [] for at in work} for name in running
    }
    warm_up = partial(requests.answer, words=16, new=16)
    texts = {name: attempt(warm_up, server, f"warm-up, {name}") for name, server in running.items()}
    for number in range(1, rounds + 1):
        for title, measurement in work.items():
            # Every other round in reverse, so that no server always follows the same one.
            for name in list(running)[:: 1 if number % 2 else -1]:
                progress_title = f"round {number} of {rounds}, {title}, {name}"
                results[name][title].append(
                    attempt(measurement, running[name], progress_title, f"{number}, {title}")
                )
    return {
        name: {"failed": case.reason}
        if isinstance(case, Failed)
        else {title: summary(values) for title, values in results[name].items()}
        | {
            "answer": summary([texts[name]]),
            "memory": {"start": case.memory, "end": memory_of(case)},
        }
        for name, case in cases.items()
    }


def attempt(
    work: Measurement, server: RunningServer, title: str, label: str = "0"
) -> Result | Failed:
    """One measurement, or why it failed; prints its seconds."""
    start = time.perf_counter()
    try:
        outcome = asyncio.run(work(server.target, label))
    except FAILURES as error:
        outcome = failed(error)
    progress(title, start, outcome)
    return outcome


def progress(title: str, start: float, outcome: Result | Failed) -> None:
    why = f", failed: {outcome.reason}" if isinstance(outcome, Failed) else ""
    print(
        f"servers: {title}: {time.perf_counter() - start:.0f} s{why}", file=sys.stderr, flush=True
    )


def failed(error: BaseException) -> Failed:
    return Failed(str(error) or type(error).__name__)


def summary(values: Sequence[Result | Failed]) -> Result:
    """The spread over the rounds of each number, or the first reason if any round failed.

    A text is the one of the first round.
    """
    for value in values:
        if isinstance(value, Failed):
            return {"failed": value.reason}
    if isinstance(values[0], dict):
        return {name: spread([value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], list):
        return [spread(turn) for turn in zip(*values, strict=True)]
    return values[0] if isinstance(values[0], str) else spread(values)


def memory_of(server: RunningServer) -> dict[str, Any]:
    """Resident bytes of a server; the reason where it has ended."""
    if (code := server.process.poll()) is not None:
        return {"failed": f"the server has ended with exit code {code}"}
    return memory(server.process.pid)


def throughput_table() -> str:
    """Tokens per second by number of clients, and bytes: a row per server."""
    results = read("servers")["results"]
    titles = [name for name in next(iter(results["cases"].values())) if "clients" in name]
    heads = (f"clients: {title.split()[-1]}" for title in titles)
    lines = table_head("server", *heads, "peak memory")
    for name, case in results["cases"].items():
        rates = (f"{case[title]['median']:.0f}" for title in titles)
        lines.append(table_row(name, *rates, show(case["memory"]["end"]["peak"])))
    caption = (
        f"Tokens per second of all clients, answers of {results['sizes']['new']} tokens, medians "
        f"of {results['rounds']} rounds:"
    )
    return page_table(lines, caption)


def latency_table() -> str:
    """Seconds to the first text and between chunks: a row per server."""
    results = read("servers")["results"]
    lines = table_head("server", "first text, turn 1", "turn 4, a page", "turn 6", "between chunks",
                       "while 4 prompts arrive", "prompts answered")  # fmt: skip
    for name, case in results["cases"].items():
        first = (f"{case['first_text'][turn]['median']:.2f}" for turn in (0, 3, 5))
        gaps = (f"{case['gap'][at]['median']:.3f}" for at in ("alone", "with_prompts"))
        answered = f"{case['gap']['prompts_answered']['median']:.1f}"
        lines.append(table_row(name, *first, *gaps, answered))
    return page_table(lines, "Seconds, medians of the same rounds:")


TABLES = {"servers_throughput": throughput_table, "servers_latency": latency_table}
RATE = "cases/{}/tokens_per_second, clients {}"
PEERS = ("transformers, default", "transformers, continuous batching")
STATEMENTS = (
    Statement("docs/results/speed.md",
              "Under `streaming`, jaxkv answers more tokens per second than transformers at every "
              "number of clients", "servers",
              [above(RATE.format("jaxkv, default policy", n), RATE.format(peer, n))
               for peer in PEERS for n in (1, 4, 16, 64)]),
    Statement("docs/results/speed.md",
              "With continuous batching it stalls for over half a minute", "servers",
              [above("cases/transformers, continuous batching/gap/with_prompts", 30)]),
)  # fmt: skip

if __name__ == "__main__":
    run_command(main)
