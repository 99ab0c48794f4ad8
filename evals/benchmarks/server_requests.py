"""Greedy streaming chat requests to a server with OpenAI's API, and what is measured with them.

The client is the same for every server: sockets of asyncio that read a stream line by line. The
prompts of two measurements differ in their first words, so that they share no prefixes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from jaxkv.evals.benchmarks.chat import messages
from jaxkv.evals.lib.text import PASSAGE

LEAD = 4  # chunks of a stream before prompts arrive
LIMIT = 600.0  # seconds of one request
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


async def ask(
    target: Target, messages: Sequence[ChatMessage], new: int, times: list[float] | None = None
) -> StreamedAnswer:
    """One answer of `new` tokens.

    times: a list that gets the time of each chunk when it comes. Raises one of FAILURES.
    """
    body = {"messages": list(messages), "max_tokens": new, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}} | target.fields  # fmt: skip
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
    return StreamedAnswer("".join(pieces), usage["completion_tokens"], start, times, perf_counter())


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


Measurement = Callable[[Target, str], Awaitable[Result]]  # its label is unique in the run


def measurements(clients: Sequence[int], sizes: RequestSizes) -> dict[str, Measurement]:
    """What is measured, by its name in the results."""
    rates = {
        f"tokens_per_second, clients {count}": partial(
            rate, clients=count, words=sizes.short, new=sizes.new
        )
        for count in clients
    }
    return {
        "first_text": partial(chat, asked=messages(), new=sizes.chat),
        **rates,
        "gap": partial(stall, words=sizes.short, new=sizes.stream, long=sizes.long),
    }


async def answer(target: Target, label: str, words: int, new: int) -> str:
    """The text of one answer."""
    return (await ask(target, prompt(label, 0, words), new)).text


async def rate(target: Target, label: str, clients: int, words: int, new: int) -> float:
    """Tokens a second of clients that ask at the same time, each for one answer."""
    prompts = [prompt(f"{label}.{client}", client * words, words) for client in range(clients)]
    answers = await ask_all([ask(target, messages, new) for messages in prompts])
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
