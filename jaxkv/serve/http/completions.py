"""The routes that answer a prompt, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxkv.errors import UserError
from jaxkv.serve.engine.request import Overloaded, Request
from jaxkv.serve.http.access import ConcurrencyLimit
from jaxkv.serve.http.body import BodyReader, ParserThreads
from jaxkv.serve.http.errors import APIError, engine_unhealthy, server_failed
from jaxkv.serve.http.logs import REQUEST_ID
from jaxkv.serve.http.metrics import Metrics, UsageRecord
from jaxkv.serve.http.rates import RateLimits
from jaxkv.serve.http.request import CompletionRequest, ServedModel, parse_request
from jaxkv.serve.http.responses import (
    FINISHED,
    AnswerDivider,
    ChoiceListener,
    ChoiceReader,
    Delta,
    Disconnect,
    Event,
    EventQueue,
    Finish,
    Json,
    ResponseFormat,
    TokenText,
    choice_of,
    parsed_message,
    part_deltas,
    usage,
)
from jaxkv.serve.http.server import Drain

LOG = logging.getLogger(__name__)
STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy must forward every event at once
}
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
COMMENT = b": waiting\n\n"  # which clients of server-sent events skip


@dataclass(frozen=True)
class CompletionRoute:
    """One route. It is its own ASGI application, to learn of a disconnect at any moment."""

    format: ResponseFormat
    model: ServedModel
    metrics: Metrics
    limit: ConcurrencyLimit
    rates: RateLimits
    bodies: BodyReader
    parsers: ParserThreads
    drain: Drain
    reply: type[Reply]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracked(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._answer(scope, receive, tracked)
        except ClientDisconnect:
            pass
        except (asyncio.CancelledError, Exception) as error:
            reported = api_error_of(error)
            if not started:  # otherwise the stream has reported it
                raise reported from None

    async def convert(self, parse: Callable[..., Json], http_request: HTTPRequest) -> Response:
        """What a function makes of a body, without an answer of the model.

        parse: as `parse_request`, but it returns JSON.
        """
        with contextlib.ExitStack() as running:
            try:
                write = lambda *arguments: encoded_in_pieces(parse(*arguments))
                read = self._read(http_request.scope, http_request.receive, running, write)
                return Response(await read, media_type="application/json")
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

    async def _read(
        self,
        scope: Scope,
        receive: Receive,
        running: contextlib.ExitStack,
        parse: Callable[..., Any],
    ) -> Any:
        """Read and parse a body. Until `running` is closed it counts as one running answer."""
        tenant = scope["state"]["tenant"]
        self.drain.check()  # before reading the body
        self.limit.check(tenant)
        raw = await self.bodies.read(tenant.digest, scope, receive)
        running.enter_context(self.drain.answering())
        running.enter_context(self.limit.enter(tenant))
        # In a thread, because a long prompt would delay other streams.
        arguments = (raw, self.format, tenant, self.model)
        return await self.parsers.run(tenant.digest, len(raw), parse, *arguments)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, config = scope["state"]["tenant"], self.model.config
        self.rates.check(tenant)  # before reading the body
        with contextlib.ExitStack() as running:
            request = await self._read(scope, receive, running, parse_request)
            running.enter_context(self.limit.enter(tenant, len(request.requests) - 1))
            id = self.format.prefix + secrets.token_hex(12)
            record = UsageRecord(id, request.requests, request.n, tenant.name)
            scope["state"]["usage"] = record
            self.rates.check(tenant)  # others of the key may have come while the body did
            # A whole answer keeps all its events.
            max_unread = config.max_unread * len(request.requests) if request.stream else math.inf
            events = EventQueue(float(max_unread))
            writer = Writer(send, config.write_seconds)
            reply = self.reply(self.format, self.model, request, id, events, writer)
            async with self._submitted(request, events, receive, record):
                self.rates.use(tenant, requests=1, tokens=record.prompt_tokens)
                running.callback(lambda: self.rates.use(tenant, tokens=record.new_tokens))
                await (reply.stream() if request.stream else reply.complete())

    @contextlib.asynccontextmanager
    async def _submitted(
        self, request: CompletionRequest, events: EventQueue, receive: Receive, record: UsageRecord
    ) -> AsyncIterator[None]:
        """Submit all requests; cancels them at the end of the context."""
        watcher = asyncio.create_task(_watch(receive, events))
        handles = []
        try:
            for index, entry in enumerate(request.requests):
                detokenizer = self.model.language.detokenizer(
                    request.stops, entry.eos, entry.min_new_tokens, request.marks
                )
                listener = ChoiceListener(
                    index, detokenizer, events, self.metrics, request.scored, record
                )
                handles.append(self._submit(entry, listener))
                await asyncio.sleep(0)  # a long prompt takes milliseconds
            self.metrics.use(record.api_key, None)
            yield
        finally:
            watcher.cancel()
            for handle in handles:
                self.model.engine.cancel(handle)

    def _submit(self, request: Request, listener: ChoiceListener) -> Any:
        """Returns the engine's handle. Raises APIError if the engine refuses the request."""
        if not self.model.engine.healthy:
            raise engine_unhealthy()
        try:
            return self.model.engine.submit(request, listener)
        except UserError as error:
            raise APIError(400, str(error)) from None
        except Overloaded as error:
            message = f"{error}; try again later"
            raise APIError(503, message, "queue_full", retry=error.seconds) from None


class Writer:
    """Writes to a client. Raises ClientDisconnect if it does not read for `seconds`."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._put, self._seconds = send, seconds
        self._last = time.monotonic()

    @property
    def quiet_seconds(self) -> float:
        """Since the last write."""
        return time.monotonic() - self._last

    async def begin(self, headers: Mapping[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, content: bytes, more_body: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": more_body})

    async def _send(self, message: Message) -> None:
        self._last = time.monotonic()
        try:
            async with asyncio.timeout(self._seconds):
                await self._put(message)
                # A write to a buffer does not wait: yield, so that other tasks run and a lost
                # connection is noticed.
                await asyncio.sleep(0)
        except TimeoutError:
            raise ClientDisconnect from None


@dataclass(frozen=True)
class Reply:
    """The response to one request, from the engine's events to the client. id: of the response."""

    format: ResponseFormat
    model: ServedModel
    request: CompletionRequest
    id: str
    events: EventQueue
    writer: Writer
    last = b"data: [DONE]\n\n"  # ends a stream

    def error(self, error: APIError) -> bytes:
        """The event of an error in a stream."""
        return server_sent(error.json.encode())

    async def complete(self) -> None:
        """Send all answers at once, when the last one has ended."""
        count = len(self.request.requests)
        events: list[list[Delta | Finish]] = [self.request.opening(n) for n in range(count)]
        while count:
            event = self.checked(await self.events.get())
            events[event.index].append(event)
            count -= isinstance(event, Finish)
        content = await asyncio.to_thread(self._content, events)
        length = str(len(content))
        await self.writer.begin({"content-type": "application/json", "content-length": length})
        await self.writer.write(content, more_body=False)

    def _content(self, events: Sequence[Sequence[Delta | Finish]]) -> bytes:
        """The body of a whole response. events: of each answer."""
        choices, dividers = [], self._dividers()
        for index, (reader, deltas) in enumerate(zip(self._readers(), events, strict=True)):
            texts, tokens = zip(*map(reader.read, deltas), strict=True)
            logprobs = self.format.logprobs([*chain(*tokens)]) if self.request.scored else None
            text, reason = "".join(texts), FINISHED[deltas[-1].reason]
            if dividers is None:
                choices.append(self.format.choice(index, text, logprobs, reason))
                continue
            divider = dividers[index]
            message = parsed_message([*chain(*map(divider.push, deltas))])
            reason = finish_reason(reason, divider.called)
            choices.append(choice_of(index, logprobs, reason, message=message))
        counts = self._usage([deltas[-1] for deltas in events], thought_tokens(dividers))
        return encoded(self._head(self.format.answer) | {"choices": choices, "usage": counts})

    async def stream(self) -> None:
        """Send each event as it comes."""
        # An error before the first event gets its own status, if it comes soon.
        first = await self.events.get(self.model.config.comment_seconds)
        if first is not None:
            self.checked(first)
        await self.writer.begin(STREAM)
        last = self.last
        try:
            await self._send_events(first)
        except ClientDisconnect:
            raise
        except (asyncio.CancelledError, Exception) as error:
            last = self.error(api_error_of(error)) + last
        # In one write: a server that stops leaves no time for a second.
        await self.writer.write(last, more_body=False)

    async def _send_events(self, first: Event | None) -> None:
        """Send each event as a chunk. first: the first one, if it has come."""
        request, readers, dividers = self.request, self._readers(), self._dividers()
        event = await self._next() if first is None else self.checked(first)
        head = self._head(self.format.chunk) | ({"usage": None} if request.usage else {})
        finishes: dict[int, Finish] = {}

        def chunk(choice: Json) -> bytes:
            return server_sent(encoded(head | {"choices": [choice]}))

        def read(event: Delta | Finish) -> tuple[str, Sequence[TokenText] | None, Json | None]:
            text, tokens = readers[event.index].read(event)
            return text, tokens, self.format.logprobs(tokens) if tokens else None

        def prompt_chunk(event: Delta) -> bytes:
            text, _, logprobs = read(event)
            return chunk(self.format.delta(event.index, text, logprobs, None))

        async def write(choice: Json) -> None:
            await self.writer.write(chunk(choice))

        async def send(event: Delta | Finish) -> None:
            last = isinstance(event, Finish)
            reason = FINISHED[event.reason] if last else None
            if not last and event.prompt:  # in a thread, because prompts may be long
                await self.writer.write(await asyncio.to_thread(prompt_chunk, event))
                return
            text, tokens, logprobs = read(event)
            if dividers is None:
                if text or tokens or reason:
                    await write(self.format.delta(event.index, text, logprobs, reason))
                return
            divider = dividers[event.index]
            deltas = [*chain(*map(part_deltas, divider.push(event)))]
            deltas += [{}] if last or (tokens and not deltas) else []
            for number, delta in enumerate(deltas, 1):
                ended = finish_reason(reason, divider.called) if number == len(deltas) else None
                await write(choice_of(event.index, logprobs, ended, delta=delta))
                logprobs = None

        for index in range(len(readers)):
            if self.format.opening is not None:
                await write(self.format.opening(index))
            for delta in request.opening(index):
                await send(delta)
        while True:
            await send(event)
            if isinstance(event, Finish):
                finishes[event.index] = event
            if len(finishes) == len(readers):
                break
            event = await self._next()
        if request.usage:
            ends = [finishes[index] for index in sorted(finishes)]
            counts = self._usage(ends, thought_tokens(dividers))
            await self.writer.write(server_sent(encoded(head | {"choices": [], "usage": counts})))

    async def _next(self) -> Delta | Finish:
        """The next event. Until it comes, comments keep clients and proxies from giving up."""
        while (event := await self.events.get(self.model.config.comment_seconds)) is None:
            await self.writer.write(COMMENT)
        if self.writer.quiet_seconds > self.model.config.comment_seconds:
            await self.writer.write(COMMENT)  # a call is shown when it is complete
        return self.checked(event)

    def checked(self, event: Event | None) -> Delta | Finish:
        """The event if the answer continues or ended normally.

        Raises ClientDisconnect or APIError otherwise.
        """
        if isinstance(event, Disconnect):
            raise ClientDisconnect
        if isinstance(event, Delta) or event.reason in FINISHED:
            return event
        if event.reason == "cancelled":
            raise server_stopping()
        if event.reason == "refused":
            field = self.request.grammar
            message = f"{field}: the answer cannot obey its grammar: {event.outcome.error}"
            raise APIError(400, message, param=field)
        if event.reason == "slow":
            message = "the answer was read too slowly and was ended; read it faster"
            raise APIError(408, message, "answer_read_too_slowly")
        error = event.outcome.error
        LOG.error("request %s: the engine failed: %s", REQUEST_ID.get(), error)
        raise APIError(500, "the engine failed on this answer; ask again, or see the server's log")

    def _readers(self) -> list[ChoiceReader]:
        request, language = self.request, self.model.language
        choices = zip(request.requests, request.echoes, request.offsets, strict=True)
        return [
            ChoiceReader(language, entry.tokens, echo, offset, request.scored)
            for entry, echo, offset in choices
        ]

    def _dividers(self) -> list[AnswerDivider] | None:
        """Of each answer; None for plain texts."""
        parser = self.request.parser
        return None if parser is None else [AnswerDivider(parser()) for _ in self.request.requests]

    def _usage(self, finishes: Sequence[Finish], thought_tokens: int | None = None) -> Json:
        outcomes = [finish.outcome for finish in finishes]
        report_cached = self.model.config.report_cached
        return usage(outcomes, self.request.n, report_cached, thought_tokens)

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model.language.name,
            "system_fingerprint": self.model.config.fingerprint,
        }


def finish_reason(reason: str | None, called: bool) -> str | None:
    """The reason of an answer that has perhaps called a tool."""
    return "tool_calls" if called and reason == "stop" else reason


def thought_tokens(dividers: Sequence[AnswerDivider] | None) -> int | None:
    """The tokens of all thoughts; None for plain texts."""
    return None if dividers is None else sum(divider.thought_tokens for divider in dividers)


def encoded(value: Json) -> bytes:
    return ENCODER.encode(value).encode("utf-8", "replace")


def encoded_in_pieces(value: Json) -> bytes:
    """As `encoded`, in small pieces, between which other threads run."""
    return "".join(ENCODER.iterencode(value)).encode("utf-8", "replace")


def server_sent(content: bytes) -> bytes:
    """One server-sent event. `content` is JSON without line ends."""
    return b"data: %b\n\n" % content


def server_stopping() -> APIError:
    message = "the server is stopping; try again later"
    return APIError(503, message, "server_stopping", retry=10.0)


def api_error_of(error: BaseException) -> APIError:
    """The error that reports an exception to the client."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return server_stopping()
    LOG.error("request %s failed", REQUEST_ID.get(), exc_info=error)
    return server_failed()


async def _watch(receive: Receive, events: EventQueue) -> None:
    """Report the disconnect of the client as an event."""
    while (await receive())["type"] != "http.disconnect":
        pass
    events.put(Disconnect())
