"""`jaxkv serve` beside the servers of transformers and llama.cpp, on the same weights.

The model is SmolLM2-135M-Instruct with the dequantised weights of its GGUF file in float32;
llama.cpp has the published file of 4 bits as well. transformers runs in an environment of its own,
and llama.cpp is compiled from the source that the package llama-cpp-python contains:

    python -m venv PEERS && PEERS/bin/pip install torch "transformers[serving]==5.24.*" accelerate
    pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B LLAMA -D CMAKE_BUILD_TYPE=Release
    cmake --build LLAMA --target llama-server llama-quantize
    python -m jaxkv.evals.benchmarks.servers --peer-python PEERS/bin/python --llama-cpp LLAMA/bin

All servers are loaded at once and take turns, round by round; only one gets requests at a time, on
loopback. Every answer is greedy and streamed, and has a fixed number of tokens: `ignore_eos` at
jaxkv and llama.cpp, and transformers' folder names no EOS. Tokens are those of `usage`. The
defaults of each server apply, but for `--fixed-batch` where it is named, for the share of the
machine's memory that transformers' continuous batching takes for its cache (`--cb-memory`; its
default of 60 % would leave too little for the others), and for the size of llama.cpp's cache, which
by default holds one context of the model for all requests, so that it refuses the four long
prompts.

`tokens_per_second`: by the number of clients that ask at once, without and with a schema. The
answers under the schema are too short to complete it; if one does not follow it, the measurement
fails. `first_text`: seconds of each turn of a chat whose requests contain the whole conversation.
`gap`: seconds between two chunks of a stream, the 99th percentile, while nothing else runs and
while four long prompts arrive; the third number is when all prompts are answered. Without
continuous batching, transformers' server answers one request after another, so prompts wait for the
stream and do not stall it. `answer`: the beginning of one answer, which shows that the servers have
the same model. `memory`: resident bytes when the server is loaded and at the end, with the peak
until then. What fails has its reason in place of a number. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from jaxkv import defaults, models
from jaxkv.errors import UserError
from jaxkv.evals.benchmarks.rates_llama_cpp import memory
from jaxkv.evals.benchmarks.schemas import array_of, integer_of, object_of
from jaxkv.evals.benchmarks.startup import messages
from jaxkv.evals.benchmarks.weights import add_chat, as_folder
from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import page_table, table_head, table_row
from jaxkv.evals.lib.timing import time_rounds
from jaxkv.evals.lib.verdict import Statement, above
from jaxkv.models.loading import smollm2
from jaxkv.models.tools.passage import PASSAGE
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
LEAD = 4  # chunks of a stream before prompts arrive
LIMIT = 600.0  # seconds of one request
LLAMA_CPP = ["--jinja", "--ctx-size", "32768", "--log-disable"]  # tokens of all sequences
FLOAT_FILE = "float32.gguf"
SCHEMA = object_of(numbers=array_of(integer_of(0, 999), 64, 64))
BEGINNING = re.compile(r'\s*\{\s*"numbers"\s*:\s*\[[\d\s,]*')  # of every answer under SCHEMA
FAILURES = (OSError, ValueError, RuntimeError)  # of a request; TimeoutError is an OSError
ChatMessage = dict[str, str]
Result = Any  # of one measurement: a number, a list of numbers, numbers by name or a text


class RequestSizes(NamedTuple):
    """Words of short and of long prompts; tokens of an answer, in a chat, and of a long stream."""

    short: int = 64
    long: int = 1500  # about 2,000 tokens
    new: int = 32
    chat: int = 24
    stream: int = 128


QUICK = RequestSizes(short=16, long=300, new=8, chat=4, stream=16)


class Target(NamedTuple):
    """A server on this machine. fields: added to every request, with the model's name."""

    port: int
    fields: Mapping[str, Any]


class StreamedAnswer(NamedTuple):
    """An answer. start, times, ended: seconds at the request, each chunk with text, and the end."""

    text: str
    tokens: int
    start: float
    times: list[float]
    ended: float


class Failed(NamedTuple):
    """Why there is no measurement."""

    reason: str


class RunningServer(NamedTuple):
    process: subprocess.Popen[bytes]
    target: Target
    memory: dict[str, int]  # when it was loaded


SERVER_FLAGS = (
    flag("--rounds", 3, "of each measurement", minimum=1),
    flag("--peer-python", type=str, required=True, about="the Python that has transformers"),
    flag("--llama-cpp", type=str, about="the folder of llama-server (default: without it)"),
    flag("--clients", (1, 4, 16), "that ask at once", minimum=1),
    flag("--cb-memory", 0.2, "share of the machine's memory", minimum=1e-9),
)


def measure(run: Run) -> dict[str, Any]:
    """Start all servers, measure and end them."""
    options = run.options
    if options.quick:
        options.rounds, options.clients = 1, [1, 4]
    sizes = QUICK if options.quick else RequestSizes()
    versions = peer_versions(options)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        llm = models.load(smollm2.NAME, dtype="float32")
        add_chat(llm, as_folder(llm, folder))
        del llm
        if options.llama_cpp is not None:
            write_float_file(options, folder / FLOAT_FILE)
        cases: dict[str, RunningServer | Failed] = {}
        for name, (command, fields) in commands(options, folder).items():
            print(f"starting {name}", file=sys.stderr, flush=True)
            try:
                cases[name] = stack.enter_context(started(command, fields))
            except FAILURES as error:
                cases[name] = failed(error)
        results = measure_servers(cases, measurements(options.clients, sizes), options.rounds)
    return {
        "model": smollm2.NAME, "jaxkv": CASES, "rounds": options.rounds,
        "sizes": sizes._asdict(), "peer": versions | {"cb_memory": options.cb_memory},
        "cases": results,
    }  # fmt: skip


def peer_versions(options: argparse.Namespace) -> dict[str, str]:
    """The version of each peer by name. Raises UserError where one does not run."""
    python = subprocess.run([options.peer_python, "-P", "-c", ABOUT], stdout=subprocess.PIPE)
    if python.returncode:
        raise UserError(f"{options.peer_python} cannot import torch and transformers, as above; "
                        "--help says how to install them")  # fmt: skip
    named = dict(zip(("transformers", "torch"), json.loads(python.stdout), strict=True))
    if options.llama_cpp is None:
        return named
    try:
        server = subprocess.run(
            [llama_cpp(options, "server"), "--version"], capture_output=True, text=True
        )
    except OSError as error:
        raise UserError(f"--llama-cpp must be a folder with llama-server, got {options.llama_cpp} "
                        f"({error.strerror}); --help says how to compile it") from None  # fmt: skip
    version = re.search(r"version: (.*)", server.stdout + server.stderr)
    return named | {"llama.cpp": version[1] if version else "unknown"}


def llama_cpp(options: argparse.Namespace, program: str) -> str:
    return str(Path(options.llama_cpp) / f"llama-{program}")


def write_float_file(options: argparse.Namespace, file: Path) -> None:
    """Write a GGUF file of the same weights in float32."""
    quantize = [llama_cpp(options, "quantize"), "--allow-requantize"]
    words = [*quantize, str(smollm2.fetch()), str(file), "F32"]
    subprocess.run(words, check=True, capture_output=True)


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
    } | {
        name: ([llama_cpp(options, "server"), "--model", str(file), *LLAMA_CPP], jaxkv_fields)
        for name, file in {
            "llama.cpp, float32": folder / FLOAT_FILE, "llama.cpp, Q4_1": smollm2.fetch(),
        }.items() if options.llama_cpp is not None
    }  # fmt: skip


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


def measure_servers(
    cases: Mapping[str, RunningServer | Failed], work: Mapping[str, Measurement], rounds: int
) -> dict[str, Any]:
    """All measurements of all servers in turn, after a warm-up request to each."""
    running = {name: case for name, case in cases.items() if isinstance(case, RunningServer)}
    labels = map(str, itertools.count())
    results: dict[str, dict[str, Result]] = {name: {} for name in running}
    warm_up = {"answer": partial(answer, words=16, new=16)}
    for title, measurement in (warm_up | work).items():
        variants = {
            name: partial(attempt, measurement, server, labels) for name, server in running.items()
        }
        count = 1 if title in warm_up else rounds
        for name, outcomes in time_rounds(variants, count, title, warm_up=False).items():
            results[name][title] = summary(outcomes)
    return {
        name: {"failed": case.reason} if isinstance(case, Failed)
        else results[name] | {"memory": {"start": case.memory, "end": memory_of(case)}}
        for name, case in cases.items()
    }  # fmt: skip


def attempt(work: Measurement, server: RunningServer, labels: Iterator[str]) -> Result | Failed:
    """One measurement, or why it failed, which is printed."""
    try:
        return asyncio.run(work(server.target, next(labels)))
    except FAILURES as error:
        return failed(error)


def failed(error: BaseException) -> Failed:
    outcome = Failed(str(error) or type(error).__name__)
    print(f"failed: {outcome.reason}", file=sys.stderr, flush=True)
    return outcome


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


async def ask(
    target: Target,
    messages: Sequence[ChatMessage],
    new: int,
    times: list[float] | None = None,
    schema: bool = False,
) -> StreamedAnswer:
    """One answer of `new` tokens.

    times: a list that gets the time of each chunk when it comes. schema: under SCHEMA. Raises one
    of FAILURES.
    """
    body = {"messages": list(messages), "max_tokens": new, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}} | target.fields  # fmt: skip
    if schema:  # which alone decides when an answer may end
        form = {"name": "numbers", "schema": SCHEMA, "strict": True}
        body |= {"response_format": {"type": "json_schema", "json_schema": form}}
        body.pop("ignore_eos", None)
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    times, pieces, usage, start = [] if times is None else times, [], None, perf_counter()
    async with asyncio.timeout(LIMIT):
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        try:
            writer.write(head.encode() + data)
            await writer.drain()
            status = (await reader.readline()).decode().strip()
            if " 200 " not in f"{status} ":
                content = (await reader.read()).rpartition(b"\r\n\r\n")[2]
                raise RuntimeError(f"{status or 'no answer'} {content.decode()[:200]}".strip())
            while line := await reader.readline():
                if not line.startswith(b"data: {"):  # headers, sizes of chunks, [DONE]
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"])[:200])
                usage = event.get("usage") or usage
                text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if text:
                    times.append(perf_counter())
                    pieces.append(text)
        finally:
            writer.close()
    if usage is None:
        raise RuntimeError("the stream ended without its usage")
    text = "".join(pieces)
    if schema and not BEGINNING.fullmatch(text):
        raise RuntimeError(f"the answer does not follow the schema: {text[:40]!r}")
    return StreamedAnswer(text, usage["completion_tokens"], start, times, perf_counter())


async def ask_all(requests: Sequence[Awaitable[StreamedAnswer]]) -> list[StreamedAnswer]:
    """All answers at once. Raises RuntimeError if any failed, after the others have ended."""
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in failed:
        if not isinstance(error, FAILURES):
            raise error
    if failed:
        reason = str(failed[0]) or type(failed[0]).__name__
        raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests failed: {reason}")
    return [outcome for outcome in outcomes if isinstance(outcome, StreamedAnswer)]


def prompt(label: str, start: int, words: int) -> list[ChatMessage]:
    """A conversation about an excerpt of the passage. label: makes its first words unique."""
    text = PASSAGE.read_text("utf-8").split()
    start %= len(text)
    excerpt = " ".join((text[start:] + text)[:words])
    return [{"role": "system", "content": f"Number {label}."}, {"role": "user", "content": excerpt}]


CLIENTS, SCHEMA_CLIENTS = "clients ", "with a schema, clients "
Measurement = Callable[[Target, str], Awaitable[Result]]  # its label is unique in the run


def measurements(clients: Sequence[int], sizes: RequestSizes) -> dict[str, Measurement]:
    """What is measured, by its name in the results."""
    rates = {
        f"tokens_per_second, {form}{count}": partial(
            rate, clients=count, words=sizes.short, new=sizes.new, schema=form == SCHEMA_CLIENTS
        )
        for form in (CLIENTS, SCHEMA_CLIENTS) for count in clients
    }  # fmt: skip
    return {
        "first_text": partial(chat, asked=messages(), new=sizes.chat),
        **rates,
        "gap": partial(stall, words=sizes.short, new=sizes.stream, long=sizes.long),
    }


async def answer(target: Target, label: str, words: int, new: int) -> str:
    """The text of one answer."""
    return (await ask(target, prompt(label, 0, words), new)).text


async def rate(
    target: Target, label: str, clients: int, words: int, new: int, schema: bool = False
) -> float:
    """Tokens a second of clients that ask at the same time, each for one answer."""
    prompts = [prompt(f"{label}.{client}", client * words, words) for client in range(clients)]
    answers = await ask_all([ask(target, messages, new, schema=schema) for messages in prompts])
    ended, start = max(answer.ended for answer in answers), min(answer.start for answer in answers)
    return sum(answer.tokens for answer in answers) / (ended - start)


async def chat(target: Target, label: str, asked: Sequence[str], new: int) -> list[float]:
    """Seconds to the first text of each answer in a conversation that grows by the answers."""
    conversation: list[ChatMessage] = [{"role": "system", "content": f"Number {label}."}]
    seconds = []
    for text in asked:
        conversation.append({"role": "user", "content": text})
        answer = await ask(target, conversation, new)
        if not answer.times:
            raise RuntimeError(f"the answer of turn {len(seconds) + 1} has no text")
        seconds.append(answer.times[0] - answer.start)
        conversation.append({"role": "assistant", "content": answer.text})
    return seconds


async def stall(
    target: Target, label: str, words: int, new: int, long: int, prompts: int = 4
) -> dict[str, float]:
    """Seconds between two chunks of one stream: the 99th percentile, alone and with prompts.

    words, new: words of the prompt and tokens of the answer of the stream. long: words of each of
    the prompts, which all arrive after LEAD chunks and get one token each. `prompts_answered`:
    seconds until they all have it. Only gaps between their arrival and their answers count.
    """
    alone = await ask(target, prompt(f"{label}.alone", 0, words), new)
    times: list[float] = []
    stream = asyncio.create_task(ask(target, prompt(f"{label}.stream", 0, words), new, times))
    while len(times) < LEAD and not stream.done():
        await asyncio.sleep(0.002)
    sent = perf_counter()
    texts = [prompt(f"{label}.{number}", number * long, long) for number in range(prompts)]
    _, *answers = await ask_all([stream, *(ask(target, text, 1) for text in texts)])
    answered = max(answer.ended for answer in answers)
    return {
        "alone": percentile(gaps(alone.times[LEAD - 1 :])),
        "with_prompts": percentile(gaps(times, sent, answered)),
        "prompts_answered": answered - sent,
    }


def gaps(times: Sequence[float], since: float = -np.inf, until: float = np.inf) -> list[float]:
    """Seconds between neighbours in `times`, of the gaps that overlap [since, until]."""
    return [b - a for a, b in itertools.pairwise(times) if b > since and a < until]


def percentile(seconds: Sequence[float], share: float = 99) -> float:
    """Raises RuntimeError where there is none: the stream then ended before the prompts came."""
    if not seconds:
        raise RuntimeError("the stream has no chunks while the prompts arrive; ask for more tokens")
    return float(np.percentile(seconds, share))


def throughput_table() -> str:
    """Tokens per second by number of clients, without and with a schema, and bytes."""
    results = read("servers")["results"]
    titles = [name for name in next(iter(results["cases"].values())) if "clients" in name]
    heads = (title.partition(", ")[2].replace("clients ", "clients: ") for title in titles)
    lines = table_head("server", *heads, "peak memory")
    for name, case in results["cases"].items():
        rates = (
            "–" if "failed" in case[title] else f"{case[title]['median']:.0f}" for title in titles
        )
        lines.append(table_row(name, *rates, show(case["memory"]["end"]["peak"])))
    caption = (
        f"Tokens per second of all clients, answers of {results['sizes']['new']} tokens, medians "
        f"of {results['rounds']} rounds (a dash: answers do not follow the schema):"
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
OURS_DEFAULT = "jaxkv, default policy"
PEERS = ("transformers, default", "transformers, continuous batching")
STATEMENTS = (
    Statement("docs/results/speed.md",
              "With one client, jaxkv under `streaming` answers more tokens per second than "
              "transformers", "servers",
              [above(RATE.format(OURS_DEFAULT, 1), RATE.format(peer, 1)) for peer in PEERS]),
    Statement("docs/results/speed.md",
              "With 4 and 16 clients, transformers with continuous batching answers more",
              "servers",
              [above(RATE.format(PEERS[1], n), RATE.format(OURS_DEFAULT, n)) for n in (4, 16)]),
    Statement("docs/results/speed.md",
              "llama.cpp in float32 answers more tokens per second than jaxkv at every number of "
              "clients", "servers",
              [above(RATE.format("llama.cpp, float32", n), RATE.format(OURS_DEFAULT, n))
               for n in (1, 4, 16)]),
    Statement("docs/results/speed.md",
              "With continuous batching it stalls for over 15 seconds", "servers",
              [above("cases/transformers, continuous batching/gap/with_prompts", 15)]),
    Statement("docs/results/speed.md", "llama.cpp's stream stalls for over 5 seconds", "servers",
              [above("cases/llama.cpp, float32/gap/with_prompts", 5)]),
)  # fmt: skip

MEASURE = Measure("servers", measure, SERVER_FLAGS, data=lambda _: [smollm2.fetch(), PASSAGE])

if __name__ == "__main__":
    run(MEASURE)
