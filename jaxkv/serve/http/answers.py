"""The routes that answer a prompt, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from jaxkv.errors import UserError
from jaxkv.serve.engine.request import Overloaded, Request
from jaxkv.serve.http import job
from jaxkv.serve.http.api_keys import ConcurrencyLimit
from jaxkv.serve.http.body import Bodies, Gone
from jaxkv.serve.http.body_parsers import BodyParsers
from jaxkv.serve.http.choices import (
    FINISHED,
    AnswerReader,
    Choice,
    End,
    Event,
    Hangup,
    Mailbox,
    Piece,
)
from jaxkv.serve.http.drain import Drain
from jaxkv.serve.http.faults import Fault
from jaxkv.serve.http.formats import Json, ResponseFormat, usage
from jaxkv.serve.http.job import Job, ServerConfig
from jaxkv.serve.http.logs import REQUEST_ID
from jaxkv.serve.http.metrics import Metrics
from jaxkv.serve.http.protocols import EngineProtocol, LanguageProtocol
from jaxkv.serve.http.usage import UsageRecord

LOG = logging.getLogger(__name__)
STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy must forward every event at once
}
COMMENT = b": waiting\n\n"  # which clients of server-sent events skip
STOPPING = "the server is stopping; try again later"


@dataclass(frozen=True)
class Answers:
    """One route. It is its own ASGI application, to learn of a disconnect at any moment."""

    format: ResponseFormat
    engine: EngineProtocol
    language: LanguageProtocol
    config: ServerConfig
    metrics: Metrics
    limit: ConcurrencyLimit
    bodies: Bodies
    parsers: BodyParsers
    drain: Drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracked(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._answer(scope, receive, tracked)
        except Gone:
            pass
        except (asyncio.CancelledError, Exception) as error:
            fault = fault_of(error)
            if not started:  # otherwise the stream has reported it
                raise fault from None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as inside:
            parsed = await self._read(scope, receive, inside)
            extra = len(parsed.requests) - 1
            inside.enter_context(self.limit.enter(scope["state"]["tenant"], extra))
            name = scope["state"]["tenant"].name
            id = self.format.prefix + secrets.token_hex(12)
            usage_record = UsageRecord(id, parsed.requests, parsed.n, name)
            scope["state"]["usage"] = usage_record
            async with self._submitted(parsed, receive, usage_record) as mailbox:
                respond = self._stream if parsed.stream else self._complete
                await respond(parsed, id, mailbox, Writer(send, self.config.write_seconds))

    async def render(self, request: HTTPRequest) -> Response:
        """The token ids of each prompt of a request that is not answered.

        Routers ask for them, to send prompts with equal beginnings to one server.
        """
        with contextlib.ExitStack() as inside:
            try:
                parsed = await self._read(request.scope, request.receive, inside)
            except Gone:
                return Response(status_code=499)  # nobody reads it
        prompts = [{"token_ids": list(entry.tokens)} for entry in parsed.requests[:: parsed.n]]
        return JSONResponse(prompts if self.format.kind == "completions" else prompts[0])

    async def _read(self, scope: Scope, receive: Receive, inside: contextlib.ExitStack) -> Job:
        """Read and parse a body. Until `inside` is closed it counts as one running answer."""
        tenant = scope["state"]["tenant"]
        self.drain.check()  # before reading the body
        self.limit.check(tenant)
        raw = await self.bodies.read(tenant.digest, scope, receive)
        inside.enter_context(self.drain.answering())
        inside.enter_context(self.limit.enter(tenant))
        # In a thread, because a long prompt would delay other streams.
        return await self.parsers.run(
            tenant.digest, len(raw), job.parse_job, raw, self.format, tenant, self.engine,
            self.language, self.config,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def _submitted(
        self, parsed: Job, receive: Receive, usage_record: UsageRecord
    ) -> AsyncIterator[Mailbox]:
        """Submit all requests; cancels them at the end of the context."""
        # A whole answer keeps all its events.
        max_events = self.config.max_unread * len(parsed.requests) if parsed.stream else math.inf
        mailbox = Mailbox(float(max_events))
        watcher = asyncio.create_task(_watch(receive, mailbox))
        handles = []
        try:
            for index, request in enumerate(parsed.requests):
                detokenizer = self.language.detokenizer(
                    parsed.stops, request.eos, request.min_new_tokens
                )
                choice = Choice(
                    index, detokenizer, mailbox, self.metrics, parsed.scored, usage_record
                )
                handles.append(self._submit(request, choice))
            self.metrics.use(usage_record.api_key, None)
            yield mailbox
        finally:
            watcher.cancel()
            for handle in handles:
                self.engine.cancel(handle)

    def _submit(self, request: Request, choice: Choice) -> Any:
        """Returns the engine's handle. Raises Fault if the engine refuses the request."""
        if not self.engine.healthy:
            raise Fault(503, "the engine does not answer; restart the server", "engine_unhealthy")
        try:
            return self.engine.submit(request, choice)
        except UserError as error:
            raise Fault(400, str(error)) from None
        except Overloaded as error:
            message = f"{error}; try again later"
            raise Fault(503, message, "queue_full", retry=error.seconds) from None

    async def _complete(self, parsed: Job, id: str, mailbox: Mailbox, writer: Writer) -> None:
        events: list[list[Piece | End]] = [parsed.opening(n) for n in range(len(parsed.requests))]
        unfinished = len(events)
        while unfinished:
            event = checked(await mailbox.get())
            events[event.index].append(event)
            unfinished -= isinstance(event, End)
        content = await asyncio.to_thread(self._content, parsed, id, events)
        await writer.begin(
            {"content-type": "application/json", "content-length": str(len(content))}
        )
        await writer.write(content, more_body=False)

    def _content(self, parsed: Job, id: str, events: Sequence[Sequence[Piece | End]]) -> bytes:
        """The body of a whole answer."""
        choices = []
        for index, (reader, choice_events) in enumerate(
            zip(self._readers(parsed), events, strict=True)
        ):
            texts, tokens = zip(*map(reader.read, choice_events), strict=True)
            logprobs = self.format.logprobs([*chain(*tokens)]) if parsed.scored else None
            reason = FINISHED[choice_events[-1].reason]
            choices.append(self.format.choice(index, "".join(texts), logprobs, reason))
        outcomes = [choice_events[-1].outcome for choice_events in events]
        return encoded(
            self._head(id, self.format.answer)
            | {"choices": choices, "usage": usage(outcomes, parsed.n, self.config.report_cached)}
        )

    async def _stream(self, parsed: Job, id: str, mailbox: Mailbox, writer: Writer) -> None:
        # An error before the first event gets its own status, if it comes soon.
        first = await mailbox.get_within(self.config.comment_seconds)
        if first is not None:
            checked(first)
        await writer.begin(STREAM)
        last = event_of(b"[DONE]")
        try:
            if first is None:
                first = await self._next(mailbox, writer)
            await self._send_events(parsed, id, checked(first), mailbox, writer)
        except Gone:
            raise
        except (asyncio.CancelledError, Exception) as error:
            last = event_of(fault_of(error).json.encode()) + last
        # In one write: a server that stops leaves no time for a second.
        await writer.write(last, more_body=False)

    async def _send_events(
        self, parsed: Job, id: str, event: Piece | End, mailbox: Mailbox, writer: Writer
    ) -> None:
        """Send each event as a chunk. event: the first one."""
        head = self._head(id, self.format.chunk) | ({"usage": None} if parsed.usage else {})
        readers, outcomes = self._readers(parsed), {}

        async def write(choice: Json) -> None:
            await writer.write(event_of(encoded(head | {"choices": [choice]})))

        async def send(event: Piece | End) -> None:
            text, tokens = readers[event.index].read(event)
            reason = FINISHED[event.reason] if isinstance(event, End) else None
            if text or tokens or reason:
                logprobs = self.format.logprobs(tokens) if tokens else None
                await write(self.format.delta(event.index, text, logprobs, reason))

        for index in range(len(readers)):
            if self.format.opening is not None:
                await write(self.format.opening(index))
            for piece in parsed.opening(index):
                await send(piece)
        while True:
            await send(event)
            if isinstance(event, End):
                outcomes[event.index] = event.outcome
            if len(outcomes) == len(readers):
                break
            event = await self._next(mailbox, writer)
        if parsed.usage:
            in_order = [outcomes[index] for index in sorted(outcomes)]
            last = {"choices": [], "usage": usage(in_order, parsed.n, self.config.report_cached)}
            await writer.write(event_of(encoded(head | last)))

    async def _next(self, mailbox: Mailbox, writer: Writer) -> Piece | End:
        """The next event. Until it comes, comments keep clients and proxies from giving up."""
        while (event := await mailbox.get_within(self.config.comment_seconds)) is None:
            await writer.write(COMMENT)
        return checked(event)

    def _readers(self, parsed: Job) -> list[AnswerReader]:
        return [
            AnswerReader(self.language, request.tokens, echo, offset, parsed.scored)
            for request, echo, offset in zip(
                parsed.requests, parsed.echoes, parsed.offsets, strict=True
            )
        ]

    def _head(self, id: str, kind: str) -> Json:
        return {
            "id": id,
            "object": kind,
            "created": int(time.time()),
            "model": self.language.name,
            "system_fingerprint": self.config.fingerprint,
        }


class Writer:
    """Writes to a client. Raises Gone if the client does not read for `seconds`."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._put, self._seconds = send, seconds

    async def begin(self, headers: Mapping[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, content: bytes, more_body: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": more_body})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._put(message)
                # A write to a buffer does not wait: yield, so that other tasks run and a lost
                # connection is noticed.
                await asyncio.sleep(0)
        except TimeoutError:
            raise Gone from None


def encoded(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event_of(content: bytes) -> bytes:
    """One server-sent event. `content` is JSON without line ends."""
    return b"data: %b\n\n" % content


def checked(event: Event) -> Piece | End:
    """The event if the answer continues or ended normally. Raises Gone or Fault otherwise."""
    if isinstance(event, Hangup):
        raise Gone
    if isinstance(event, Piece) or event.reason in FINISHED:
        return event
    if event.reason == "cancelled":
        raise Fault(503, STOPPING, "server_stopping", retry=10.0)
    if event.reason == "slow":
        message = "the answer was read too slowly and was ended; read it faster"
        raise Fault(408, message, "answer_read_too_slowly")
    LOG.error("request %s: the engine failed: %s", REQUEST_ID.get(), event.outcome.error)
    raise Fault(500, "the engine failed on this answer; ask again, or see the server's log")


def fault_of(error: BaseException) -> Fault:
    """The Fault that reports an exception to the client."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Fault(503, STOPPING, "server_stopping", retry=10.0)
    LOG.error("request %s failed", REQUEST_ID.get(), exc_info=error)
    return Fault(500, "the server failed; its standard error says why")


async def _watch(receive: Receive, mailbox: Mailbox) -> None:
    """Put a Hangup into the mailbox when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    mailbox.put(Hangup())
