"""Ten thousand requests with four API keys, a restart between: no leaks, equal answers, fair turns.

Each of some hundred requests is first answered alone, by a server without prefix caching. Then they
come in any order, streamed or whole. Some clients disconnect before or during the answer, or with a
second request on the connection, and some send their bodies slowly. One key has three times the
clients of each other. The prefix memory is so small that prefixes are evicted. After half of the
requests the server is started again with the same folder of prefixes. Memory and open files are
those of the server's process, counted while it is idle; the other figures are those that the server
reports. A quarter of the requests has a schema, and a quarter has tools, of which the answer must
call one; half of the latter use the Responses API. All this with a fixed batch, in which answers
must be equal, and with a batch that grows with load, where the last bits of logits, and so seldom a
token, may depend on the batch.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv import models
from jaxkv.evals.benchmarks import servers
from jaxkv.evals.benchmarks.rates_llama_cpp import memory
from jaxkv.evals.benchmarks.schemas import array_of, integer_of, object_of, text_of
from jaxkv.evals.benchmarks.servers import RunningServer
from jaxkv.evals.benchmarks.serving import BOOKS, books_of, passages
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import bar
from jaxkv.evals.lib.verdict import claim, within
from jaxkv.models import Llm

POLICIES = ("streaming:sinks=4,window=252", "full")
BATCHES = {"fixed": ("--fixed-batch",), "growing": ()}  # flags of the server, by kind of batch
KINDS, REST = 200, 1000  # distinct requests, requests between idle checks
CLIENTS = {"many": 24, "one": 8, "two": 8, "three": 8}  # at a time, by API key
ADMIN = "admin"
# Share of clients that disconnect, by time; `next`: with a second request on the connection.
LEAVES = {"before": 0.1, "amid": 0.2, "next": 0.05}
SLOW, PAUSE = 0.05, 0.2  # share of bodies that come in two parts, seconds between the parts
DIFFER = {"fixed": 0.0, "growing": 0.01}  # bar: share of answers that differ
GROWTH = 1.05  # bar: growth of resident memory between idle checks
FAIR = 2.0  # bar: answers of the API key with most over those of the key with fewest


COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
# The default model has no chat template; this one shows tools in the form of Hermes.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
SCHEMA = object_of(
    name=text_of(9), sizes=array_of(integer_of(0, 99), 1, 4), kind={"enum": ["a", "b", None]}
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (
        ("weather", object_of(city=text_of(9))),
        ("sum", object_of(of=array_of(integer_of(-9, 9), 2, 3))),
    )
]


class SoakQuestion(NamedTuple):
    """What a request asks for: the path of its route, and its body."""

    path: str
    body: dict[str, Any]


class SoakRequest(NamedTuple):
    """One request and its client; `leaves`: when it disconnects (a key of LEAVES) or ""."""

    kind: int
    stream: bool
    leaves: str
    key: str = "many"
    slow: bool = False


FLAGS = (
    flag("--requests", 10_000, "of each policy and kind of batch", minimum=1),
    flag("--texts", BOOKS, "a folder of books"),
)


def measure(run: Run) -> dict[str, Any]:
    """Both policies with both kinds of batch, and their bars."""
    llm = models.load()
    run.record.add(llm.files)
    texts = [llm.tokenizer.encode(file.read_text("utf-8")) for file in books_of(run.options)]
    results: dict[str, Any] = {"policies": {}, "bars": []}
    asked = questions(llm, texts)
    count = 600 if run.options.quick else run.options.requests
    for policy, batch in product(POLICIES, BATCHES):
        results_of_case = asyncio.run(soak(policy, BATCHES[batch], asked, count))
        results["policies"].setdefault(policy, {})[batch] = results_of_case
        results["bars"] += bars(policy, batch, results_of_case)
    return results


def questions(llm: Llm, texts: list[list[int]]) -> list[SoakQuestion]:
    """Distinct requests; some share prefixes. Of four, one has a schema and one has tools."""
    rng = np.random.default_rng(0)
    pages, asked = passages(texts), []
    while len(asked) < KINDS:
        page = next(pages)
        for number in range(4):
            tokens = list(page[: int(rng.integers(1, 500))])
            body: dict[str, Any] = {
                "model": "default", "max_tokens": int(rng.integers(1, 48)), "seed": len(asked),
                "temperature": float(rng.choice([0.0, 0.8])),
            }  # fmt: skip
            if number == 3:
                message = {"role": "user", "content": llm.tokenizer.decode(tokens)}
                body["max_tokens"] += 48  # a call that is cut is left out
                body |= {"messages": [message], "tools": TOOLS, "tool_choice": "required"}
                if len(asked) % 8 == 7:
                    asked.append(SoakQuestion(RESPONSES, as_response(body)))
                    continue
            else:
                ends = {"structured_outputs": {"json": SCHEMA}} if number == 2 else {}
                body |= {"prompt": tokens, "logprobs": None} | (ends or {"ignore_eos": True})
            asked.append(SoakQuestion(CHAT if number == 3 else COMPLETIONS, body))
    return asked


def as_response(chat: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat for the Responses API."""
    body = {name: chat[name] for name in ("model", "seed", "temperature", "tool_choice")}
    tools = [{"type": "function"} | tool["function"] for tool in TOOLS]
    return body | {
        "input": chat["messages"], "tools": tools, "max_output_tokens": chat["max_tokens"]
    }  # fmt: skip


async def soak(
    policy: str, flags: Sequence[str], kinds: list[SoakQuestion], count: int
) -> dict[str, Any]:
    """Two lives of a server with one folder of prefixes. flags: flags of the kind of batch."""
    with tempfile.TemporaryDirectory() as folder:
        keys, admins = Path(folder) / "keys", Path(folder) / "admins"
        keys.write_text("\n".join(CLIENTS))
        template = Path(folder) / "template"
        template.write_text(TEMPLATE)
        admins.write_text(ADMIN)
        flags = [*flags, "--chat-template", str(template)]
        shared = [*flags, "--api-key-file", str(keys), "--admin-key-file", str(admins)]
        alone = await answers_alone(policy, kinds, shared)
        words = [*shared, "--prefix-memory", "8MiB", "--prefix-dir", str(Path(folder) / "prefixes")]
        rng, lives = np.random.default_rng(1), []
        for life in range(2):
            part = count // 2 if life == 0 else count - count // 2
            lives.append(await one_life(policy, words, kinds, alone, part, rng))
    total = {name: sum(life[name] for life in lives) for name in ("requests", "left", "wrong")}
    return total | {"finished": total["requests"] - total["left"], "lives": lives}


async def one_life(
    policy: str,
    words: Sequence[str],
    kinds: list[SoakQuestion],
    alone: Sequence[str],
    count: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """From the start of a server to its end."""
    with started(policy, words) as server:
        rests = [await rest(server)]
        done, disconnected, wrong, ratios, began = 0, 0, 0, [], time.monotonic()
        for _ in range(-(-count // REST)):
            batch = [draw_request(rng) for _ in range(min(REST, count - done))]
            texts, ends = await ask_all(server.target.port, kinds, batch)
            wrong += sum(
                text != alone[request.kind]
                for request, text in zip(batch, texts, strict=True) if not request.leaves
            )  # fmt: skip
            disconnected += sum(bool(request.leaves) for request in batch)
            done += len(batch)
            ratios.append(unfairness([request.key for request in batch], ends))
            rests.append(await rest(server))
            rate = done / (time.monotonic() - began)
            print(f"{policy}: {done} of {count}, {rate:.1f} a second, "
                  f"{(count - done) / rate:.0f} s left", file=sys.stderr, flush=True)  # fmt: skip
    return {
        "requests": done, "left": disconnected, "wrong": wrong, "items_per_second": rate,
        "unfairness": ratios, "rests": rests,
    }  # fmt: skip


def unfairness(keys: Sequence[str], ends: Sequence[float]) -> float:
    """Answers of the key with most over those of the key with fewest, while all keys have clients.

    ends: when each answer ended. After the last answer of any key its clients no longer compete.
    """
    by_key = {key: [end for k, end in zip(keys, ends, strict=True) if k == key] for key in CLIENTS}
    until = min(max(of_key) for of_key in by_key.values())
    counts = [sum(end <= until for end in of_key) for of_key in by_key.values()]
    return max(counts) / max(1, min(counts))


async def answers_alone(policy: str, kinds: list[SoakQuestion], words: Sequence[str]) -> list[str]:
    """Each answer from an idle server without prefix caching."""
    with started(policy, [*words, "--prefix-memory", "0"]) as server:
        return [
            await ask_server(server.target.port, body, SoakRequest(n, False, ""))
            for n, body in enumerate(kinds)
        ]


def started(policy: str, words: Sequence[str]) -> AbstractContextManager[RunningServer]:
    """A server under this policy. words: more of its command line."""
    fixed = ["--policy", policy, "--max-batch", "16", "--max-len", "1024"]
    return servers.started([sys.executable, "-m", "jaxkv.cli", "serve", *fixed, *words], {})


def draw_request(rng: np.random.Generator) -> SoakRequest:
    leaves = str(rng.choice(["", *LEAVES], p=[1 - sum(LEAVES.values()), *LEAVES.values()]))
    return SoakRequest(
        int(rng.integers(KINDS)), bool(rng.random() < 0.5) or leaves == "amid", leaves,
        str(rng.choice(list(CLIENTS))), bool(rng.random() < SLOW),
    )  # fmt: skip


async def ask_all(
    port: int, kinds: list[SoakQuestion], batch: list[SoakRequest]
) -> tuple[list[str], list[float]]:
    """The texts of a batch, and when each ended; CLIENTS says how many clients ask at a time."""
    gates = {key: asyncio.Semaphore(clients) for key, clients in CLIENTS.items()}

    async def ask_gated(request: SoakRequest) -> tuple[str, float]:
        async with gates[request.key]:
            return await ask_server(port, kinds[request.kind], request), time.monotonic()

    texts, ends = zip(*await asyncio.gather(*map(ask_gated, batch)), strict=True)
    return list(texts), list(ends)


async def ask_server(port: int, question: SoakQuestion, how: SoakRequest) -> str:
    """The text of an answer and its calls, up to the point where its client disconnects.

    Raises RuntimeError for a status other than 200.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(question.body | {"stream": how.stream}).encode()
        again = "keep-alive" if how.leaves == "next" else "close"
        request = (
            f"POST {question.path} HTTP/1.1\r\nhost: localhost\r\nconnection: {again}\r\n"
            f"authorization: Bearer {how.key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        ).encode() + data
        half = len(request) - len(data) // 2 if how.slow else len(request)
        writer.write(request[:half])
        if how.slow:
            await writer.drain()
            await asyncio.sleep(PAUSE)
        writer.write(request[half:])
        if how.leaves == "next":
            writer.write(request)
        await writer.drain()
        if how.leaves == "before":
            await asyncio.sleep(0.02 * (how.kind % 5))
            return ""
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.splitlines()[0]:
            raise RuntimeError(f"{head!r} {await reader.read()!r}")
        if how.leaves:
            await reader.readline()
            return ""
        content = await reader.read()
    finally:
        writer.close()
    if not how.stream:
        return text_of_answer([content[content.index(b"{") : content.rindex(b"}") + 1]])
    return text_of_answer(re.findall(rb"^data: (\{.*\})\r?$", content, re.MULTILINE))


def text_of_answer(events: Sequence[bytes]) -> str:
    """The text of all events, and name and arguments of each call."""
    text, parsed = "", [json.loads(event) for event in events]
    for item in (parsed[-1].get("response") or parsed[-1]).get("output", ()):
        text += "".join(part["text"] for part in item.get("content", ()))
        text += item.get("name", "") + item.get("arguments", "")
    for choice in (choice for event in parsed for choice in event.get("choices", ())):
        message = choice.get("message") or choice.get("delta") or {}
        text += choice.get("text") or message.get("content") or ""
        for call in message.get("tool_calls") or ():
            text += (call["function"].get("name") or "") + (call["function"]["arguments"] or "")
    return text


async def rest(server: RunningServer) -> dict[str, float]:
    """The server's memory, open files and metrics when it is idle.

    Raises RuntimeError if it does not become idle.
    """
    for _ in range(200):
        figures = await metrics(server.target.port)
        if not figures["jaxkv:num_requests_running"] and not figures["jaxkv:num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    else:
        raise RuntimeError(f"still running: {figures}")
    await asyncio.sleep(1)  # for sockets that are being closed
    pid = server.process.pid
    return {
        "resident": memory(pid)["resident"],
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "cache_usage": figures["jaxkv:kv_cache_usage_perc"],
        "prefixes": figures["jaxkv:prefix_entries_stored"],
        "prefixes_in_use": figures["jaxkv:prefix_entries_in_use"],
        "evictions": figures["jaxkv:prefix_cache_evictions_total"],
        "prefix_tokens": figures["jaxkv:prefix_cache_queries_total"],
        "prefix_hits": figures["jaxkv:prefix_cache_hits_total"],
        "compilations": figures["jaxkv:compilations_total"],
    }


async def metrics(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"authorization: Bearer %s\r\n\r\n" % ADMIN.encode()
    )
    content = (await reader.read()).decode()
    writer.close()
    lines = (line.split() for line in content.splitlines() if line.startswith("jaxkv:"))
    return {line[0]: float(line[1]) for line in lines if len(line) == 2}


def bars(policy: str, batch: str, results: dict[str, Any]) -> list[dict[str, object]]:
    """The bars: equal answers, no growth in either life, fair turns, and prefixes that survive."""
    ends = [(life["rests"][min(2, len(life["rests"]) - 1)], life["rests"][-1])
            for life in results["lives"]]  # fmt: skip
    first = [early_hits(life) for life in results["lives"]]
    ratios = [ratio for life in results["lives"] for ratio in life["unfairness"]]
    case = f"{policy}, {batch} batch"
    return [
        bar(f"share of answers that differ from those of single requests, {case}",
            results["wrong"] / results["finished"], "<=", DIFFER[batch]),
        bar(f"growth of the number of open files, {case}",
            max(last["files"] - early["files"] for early, last in ends), "<=", 0),
        bar(f"memory at the end over memory after {2 * REST:,} requests, {case}",
            max(last["resident"] / early["resident"] for early, last in ends), "<=", GROWTH),
        bar(f"prefixes in use while no request runs, {case}",
            max(last["prefixes_in_use"] for _, last in ends), "<=", 0),
        bar(f"programs compiled during serving, {case}",
            max(last["compilations"] - early["compilations"] for early, last in ends), "<=", 0),
        bar(f"answers of the API key with most over those of the key with fewest, {case}",
            float(np.median(ratios)), "<=", FAIR),
        bar(f"prefix tokens found in the first {REST:,} requests, after a restart over before, "
            f"{case}", first[1] / max(first[0], 1), ">=", 1),
    ]  # fmt: skip


def early_hits(life: dict[str, Any]) -> float:
    """Prompt tokens found among the prefixes until the first idle check."""
    before, after = life["rests"][:2]
    return after["prefix_hits"] - before["prefix_hits"]


def missed_bars(results: dict[str, Any]) -> dict[str, int]:
    return {"missed bars": sum(not line["met"] for line in results["bars"])}


CLAIMS = (
    claim("not claimed",
          "When clients disconnect, no answer changes, and no bar on leaks and fairness is missed",
          "soak", within("policies/{policy}/{batch}/wrong"), within(missed_bars), unit="count"),
)  # fmt: skip

MEASURE = Measure("soak", measure, FLAGS, data=books_of)

if __name__ == "__main__":
    run(MEASURE)
