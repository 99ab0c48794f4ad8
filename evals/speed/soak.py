"""Ten thousand concurrent requests to a server, some cancelled: no leaks, equal answers.

Each of some hundred requests is first answered alone, by a server without prefix caching. Then they
come in any order, streamed or whole; some clients disconnect before or during the answer. Memory
and open files are those of the server's process, counted while it is idle; cache usage and prefixes
are those that the server reports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import Record
from jaxkv.evals.lib.timing import bar
from jaxkv.evals.speed.serving import BOOKS, passages

POLICIES = ("streaming:sinks=4,window=252", "full")
KINDS, AT_ONCE, REST = 200, 48, 1000  # distinct requests, clients, requests between idle checks
LEAVES = {"before": 0.1, "amid": 0.2}  # share of clients that disconnect, by time
GROWTH = 1.05  # bar: growth of resident memory between idle checks


class SoakRequest(NamedTuple):
    """One request and its client; `leaves`: when it disconnects (before, amid) or ""."""

    kind: int
    stream: bool
    leaves: str


def main() -> None:
    ask = argparse.ArgumentParser(
        prog="python -m jaxkv.evals.speed.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ask.add_argument("--requests", type=int, default=10_000, help="of each policy")
    ask.add_argument("--texts", type=Path, default=BOOKS, help="a folder of books")
    ask.add_argument("--quick", action="store_true", help="600 requests, into out/")
    given = ask.parse_args()
    files = sorted(given.texts.glob("*.txt"))
    if not files or given.requests < 1:
        ask.error(f"--texts must hold books and --requests be 1 or more, got {given.requests}")
    llm = models.load()
    texts = [llm.tokenizer.encode(file.read_text("utf-8")) for file in files]
    record = Record("soak", [*llm.files, *files], [0], given.quick)
    results: dict[str, Any] = {"policies": {}, "bars": []}
    for policy in POLICIES:
        count = 600 if given.quick else given.requests
        found = asyncio.run(soak(policy, bodies(texts), count))
        results["policies"][policy] = found
        results["bars"] += bars(policy, found)
    record.finish(results)


def bodies(texts: list[list[int]]) -> list[dict[str, Any]]:
    """Distinct requests; some share prefixes."""
    rng = np.random.default_rng(0)
    pages, made = passages(texts), []
    while len(made) < KINDS:
        page = next(pages)
        for _ in range(4):
            made.append({
                "model": "default", "prompt": list(page[: int(rng.integers(1, 500))]),
                "max_tokens": int(rng.integers(1, 48)), "seed": len(made), "ignore_eos": True,
                "temperature": float(rng.choice([0.0, 0.8])), "logprobs": None,
            })  # fmt: skip
    return made


async def soak(policy: str, kinds: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """The whole experiment for one policy, against its own server."""
    alone = await answers_alone(policy, kinds)
    words = [sys.executable, "-m", "jaxkv.cli", "serve", "--port", "0", "--policy", policy,
             "--max-batch", "16", "--max-len", "1024", "--prefix-memory", "64MiB"]  # fmt: skip
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        port = port_of(process)
        rng, done, wrong = np.random.default_rng(1), 0, 0
        rests, begun = [await rest(port, process.pid)], time.monotonic()
        left = 0
        for _ in range(-(-count // REST)):
            batch = [draw_request(rng) for _ in range(min(REST, count - done))]
            texts = await ask_all(port, kinds, batch)
            wrong += sum(
                text != alone[one.kind]
                for one, text in zip(batch, texts, strict=True) if not one.leaves
            )  # fmt: skip
            left += sum(bool(one.leaves) for one in batch)
            done += len(batch)
            rests.append(await rest(port, process.pid))
            rate = done / (time.monotonic() - begun)
            print(f"{policy}: {done} of {count}, {rate:.1f} a second, "
                  f"{(count - done) / rate:.0f} s left", file=sys.stderr, flush=True)  # fmt: skip
        return {
            "requests": done, "left": left, "finished": done - left, "wrong": wrong,
            "items_per_second": rate, "rests": rests,
        }  # fmt: skip
    finally:
        process.terminate()
        process.wait(30)


async def answers_alone(policy: str, kinds: list[dict[str, Any]]) -> list[str]:
    """Each answer from an idle server without prefix caching."""
    words = [sys.executable, "-m", "jaxkv.cli", "serve", "--port", "0", "--policy", policy,
             "--max-batch", "16", "--max-len", "1024", "--prefix-memory", "0"]  # fmt: skip
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        port = port_of(process)
        return [
            await ask_server(port, body, SoakRequest(n, False, "")) for n, body in enumerate(kinds)
        ]
    finally:
        process.terminate()
        process.wait(30)


def port_of(process: subprocess.Popen) -> int:
    """The port that the server prints; raises RuntimeError if the server ends first."""
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    raise RuntimeError("the server ended before it listened")


def draw_request(rng: np.random.Generator) -> SoakRequest:
    leaves = str(rng.choice(["", *LEAVES], p=[1 - sum(LEAVES.values()), *LEAVES.values()]))
    return SoakRequest(
        int(rng.integers(KINDS)), bool(rng.random() < 0.5) or leaves == "amid", leaves
    )


async def ask_all(port: int, kinds: list[dict[str, Any]], batch: list[SoakRequest]) -> list[str]:
    """The texts of a batch, this many clients at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(each: SoakRequest) -> str:
        async with gate:
            return await ask_server(port, kinds[each.kind], each)

    return await asyncio.gather(*map(one, batch))


async def ask_server(port: int, body: dict[str, Any], how: SoakRequest) -> str:
    """The text of an answer, up to the point where its client disconnects.

    Raises RuntimeError for a status other than 200.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body | {"stream": how.stream}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data
        )
        await writer.drain()
        if how.leaves == "before":
            await asyncio.sleep(0.02 * (how.kind % 5))
            return ""
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.splitlines()[0]:
            raise RuntimeError(f"{head!r} {await reader.read()!r}")
        if how.leaves == "amid":
            await reader.readline()
            return ""
        content = await reader.read()
    finally:
        writer.close()
    if not how.stream:
        return json.loads(content[content.index(b"{") : content.rindex(b"}") + 1])["choices"][0][
            "text"
        ]
    events = re.findall(rb"^data: (\{.*\})\r?$", content, re.MULTILINE)
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


async def rest(port: int, pid: int) -> dict[str, float]:
    """The server's memory, open files and metrics when it is idle.

    Raises RuntimeError if it does not become idle.
    """
    for _ in range(200):
        figures = await metrics(port)
        if not figures["jaxkv:num_requests_running"] and not figures["jaxkv:num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    else:
        raise RuntimeError(f"still running: {figures}")
    await asyncio.sleep(1)  # for sockets that are being closed
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        "resident": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024,
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "cache_usage": figures["jaxkv:kv_cache_usage_perc"],
        "prefixes": figures["jaxkv:prefix_entries_stored"],
        "prefixes_in_use": figures["jaxkv:prefix_entries_in_use"],
        "compilations": figures["jaxkv:compilations_total"],
    }


async def metrics(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    content = (await reader.read()).decode()
    writer.close()
    lines = (line.split() for line in content.splitlines() if line.startswith("jaxkv:"))
    return {line[0]: float(line[1]) for line in lines if len(line) == 2}


def bars(policy: str, found: dict[str, Any]) -> list[dict[str, object]]:
    """The bars: equal answers, and no growth."""
    first, last = found["rests"][min(2, len(found["rests"]) - 1)], found["rests"][-1]
    return [
        bar(f"answers that differ from those of single requests, {policy}", found["wrong"],
            "<=", 0),
        bar(f"growth of the number of open files, {policy}", last["files"] - first["files"],
            "<=", 0),
        bar(f"memory at the end over memory after {2 * REST:,} requests, {policy}",
            last["resident"] / first["resident"], "<=", GROWTH),
        bar(f"prefixes in use while no request runs, {policy}", last["prefixes_in_use"], "<=", 0),
        bar(f"programs compiled during serving, {policy}",
            last["compilations"] - first["compilations"], "<=", 0),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
