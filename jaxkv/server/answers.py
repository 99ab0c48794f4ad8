"""POST a prompt, get an answer: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from jaxkv.engine.request import Overloaded, Request
from jaxkv.errors import UserError
from jaxkv.server import body, work
from jaxkv.server.body import Gone
from jaxkv.server.choices import FINISHED, Choice, End, Event, Hangup, Mailbox, Piece, Reader
from jaxkv.server.faults import Fault
from jaxkv.server.keys import Door
from jaxkv.server.language import Engine, Language
from jaxkv.server.metrics import Metrics
from jaxkv.server.shapes import Json, Shape, usage
from jaxkv.server.work import Terms, Work

LOG = logging.getLogger(__name__)
STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy is to pass every event on as it comes
}
STOPPING = "the server is stopping; ask again when it is back"


@dataclass(frozen=True)
class Answers:
    """One route, an ASGI application of its own: it must hear at any moment that a client left."""

    shape: Shape
    engine: Engine
    language: Language
    terms: Terms
    metrics: Metrics
    door: Door
    readers: Executor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._answer(scope, receive, noted)
        except Gone:
            pass
        except (asyncio.CancelledError, Exception) as error:
            fault = fault_of(error)
            if not begun:  # else it has been told in the stream, as far as anyone listens
                raise fault from None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, terms = scope["state"]["tenant"], self.terms
        with contextlib.ExitStack() as inside:
            inside.enter_context(self.door.enter(tenant))  # before anything is read
            raw = await body.read(scope, receive, terms.body, terms.read_seconds)
            # In a thread: a long prompt must not hold up the streams of others. Of few threads, for
            # each may hold a hundred times what it reads.
            asked = await asyncio.get_running_loop().run_in_executor(
                self.readers, work.read, raw, self.shape, tenant, self.engine, self.language, terms
            )
            inside.enter_context(self.door.enter(tenant, len(asked.requests) - 1))
            async with self._engaged(asked, receive) as mailbox:
                tell = self._stream if asked.stream else self._whole
                await tell(asked, mailbox, Writer(send, terms.write_seconds))

    @contextlib.asynccontextmanager
    async def _engaged(self, asked: Work, receive: Receive) -> AsyncIterator[Mailbox]:
        """Inside, the engine is at work and its events come; afterwards nothing of it goes on."""
        # Of a whole answer all is kept in any case.
        most = self.terms.unread * len(asked.requests) if asked.stream else math.inf
        mailbox = Mailbox(float(most))
        watcher = asyncio.create_task(_watch(receive, mailbox))
        tickets = []
        try:
            for index, request in enumerate(asked.requests):
                row = self.language.row(asked.stops, request.eos)
                choice = Choice(index, row, mailbox, self.metrics, asked.scored)
                tickets.append(self._submit(request, choice))
            yield mailbox
        finally:
            watcher.cancel()
            for ticket in tickets:
                self.engine.cancel(ticket)

    def _submit(self, request: Request, choice: Choice) -> Any:
        """The engine's ticket. Raises Fault where it takes no such request, or none now."""
        if not self.engine.healthy:
            raise Fault(503, "the engine does not answer; the server must be started again")
        try:
            return self.engine.submit(request, choice)
        except UserError as error:
            raise Fault(400, str(error)) from None
        except Overloaded as error:
            raise Fault(503, f"{error}; try again later", retry=error.seconds) from None

    async def _whole(self, asked: Work, mailbox: Mailbox, writer: Writer) -> None:
        events: list[list[Piece | End]] = [asked.opening(n) for n in range(len(asked.requests))]
        going = len(events)
        while going:
            event = checked(await mailbox.get())
            events[event.index].append(event)
            going -= isinstance(event, End)
        content = await asyncio.to_thread(self._content, asked, events)
        await writer.begin(
            {"content-type": "application/json", "content-length": str(len(content))}
        )
        await writer.write(content, more=False)

    def _content(self, asked: Work, events: Sequence[Sequence[Piece | End]]) -> bytes:
        """The body of a whole answer."""
        choices = []
        for index, (reader, own) in enumerate(zip(self._readers(asked), events, strict=True)):
            texts, told = zip(*map(reader.read, own), strict=True)
            logprobs = self.shape.logprobs([*chain(*told)]) if asked.scored else None
            reason = FINISHED[own[-1].reason]
            choices.append(self.shape.choice(index, "".join(texts), logprobs, reason))
        outcomes = [own[-1].outcome for own in events]
        return encoded(
            self._head(self.shape.whole)
            | {"choices": choices, "usage": usage(outcomes, asked.n, self.terms.tell_cached)}
        )

    async def _stream(self, asked: Work, mailbox: Mailbox, writer: Writer) -> None:
        # What fails before the first word fails with a status of its own.
        first = checked(await mailbox.get())
        await writer.begin(STREAM)
        last = event_of(b"[DONE]")
        try:
            await self._tell(asked, first, mailbox, writer)
        except Gone:
            raise
        except (asyncio.CancelledError, Exception) as error:
            last = event_of(fault_of(error).json.encode()) + last
        # At once: a server that ends leaves no time for a second write.
        await writer.write(last, more=False)

    async def _tell(
        self, asked: Work, event: Piece | End, mailbox: Mailbox, writer: Writer
    ) -> None:
        """Every event as it comes, in chunks; event: the first."""
        head = self._head(self.shape.chunk) | ({"usage": None} if asked.usage else {})
        readers, outcomes = self._readers(asked), {}

        async def write(choice: Json) -> None:
            await writer.write(event_of(encoded(head | {"choices": [choice]})))

        async def tell(event: Piece | End) -> None:
            text, told = readers[event.index].read(event)
            reason = FINISHED[event.reason] if isinstance(event, End) else None
            if text or told or reason:
                logprobs = self.shape.logprobs(told) if told else None
                await write(self.shape.delta(event.index, text, logprobs, reason))

        for index in range(len(readers)):
            if self.shape.opening is not None:
                await write(self.shape.opening(index))
            for piece in asked.opening(index):
                await tell(piece)
        while True:
            await tell(event)
            if isinstance(event, End):
                outcomes[event.index] = event.outcome
            if len(outcomes) == len(readers):
                break
            event = checked(await mailbox.get())
        if asked.usage:
            in_order = [outcomes[index] for index in sorted(outcomes)]
            told = {"choices": [], "usage": usage(in_order, asked.n, self.terms.tell_cached)}
            await writer.write(event_of(encoded(head | told)))

    def _readers(self, asked: Work) -> list[Reader]:
        return [
            Reader(self.language, request.tokens, echo, asked.scored)
            for request, echo in zip(asked.requests, asked.echoes, strict=True)
        ]

    def _head(self, kind: str) -> Json:
        return {
            "id": self.shape.prefix + secrets.token_hex(12),
            "object": kind,
            "created": int(time.time()),
            "model": self.language.name,
            "system_fingerprint": self.terms.fingerprint,
        }


class Writer:
    """Sends to a client that reads. seconds: without which it is given up, and Gone raised."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._put, self._seconds = send, seconds

    async def begin(self, headers: Mapping[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, content: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": more})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._put(message)
                # Neither writing nor reading what is there waits: let others have a turn, and the
                # loss of the connection be known.
                await asyncio.sleep(0)
        except TimeoutError:
            raise Gone from None


def encoded(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event_of(content: bytes) -> bytes:
    """One server-sent event; JSON has no line ends of its own."""
    return b"data: %b\n\n" % content


def checked(event: Event) -> Piece | End:
    """The event, where the answer goes on or has ended well. Raises Gone and Fault."""
    if isinstance(event, Hangup):
        raise Gone
    if isinstance(event, Piece) or event.reason in FINISHED:
        return event
    if event.reason == "cancelled":
        raise Fault(503, STOPPING, retry=10.0)
    if event.reason == "behind":
        raise Fault(408, "the answer was read too slowly and has been ended; read it faster")
    LOG.error("the engine failed: %s", event.outcome.error)
    raise Fault(500, "the engine failed on this answer; ask again, or see what the server says")


def fault_of(error: BaseException) -> Fault:
    """What is told of anything that went wrong."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Fault(503, STOPPING, retry=10.0)
    LOG.error("an answer failed", exc_info=error)
    return Fault(500, "the server failed; what it says on standard error tells us why")


async def _watch(receive: Receive, mailbox: Mailbox) -> None:
    """Tell when the client leaves, whether or not anything is being sent to it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    mailbox.put(Hangup())
