"""Connections of clients: limits that keep idle and broken ones from locking others out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxkv.serve.http.drain import Drain
from jaxkv.serve.http.framing import RequestParser

LOG = logging.getLogger(__name__)
MOST = 8192  # connections, because each takes some 20 KB
SPARE = 64  # descriptors that are left for files and for connections on their way
ACCEPTED = 4  # connections that asyncio accepts before the limit counts them
AHEAD = 2**16  # bytes that a client may send beyond the request that is being answered
# The rest of a body whose request was refused is read this long, so that the client, which may not
# read before it has sent everything, gets the response.
LINGER_SECONDS, LINGER_BYTES = 0.5, 2**20
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
QUIET = 60.0  # seconds between reports of the same condition
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: 0\r\n\r\n"
)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, where the system allows it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # absent on Windows

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except ValueError:  # macOS: its hard limit is infinite, and its largest soft limit is this
            resource.setrlimit(resource.RLIMIT_NOFILE, (10240, hard))


def most_connections() -> int:
    """The connections that fit under the limit of open files, at most MOST."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):
        return MOST
    if limit == resource.RLIM_INFINITY:
        return MOST
    return max(1, min(MOST, limit - used - min(SPARE, limit // 4)))


class ConnectionLimit:
    """The number of connections, and those on which no request is being answered.

    limit: connections. seconds: for a client to send a whole header. idle: the longest idle first.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit, self.seconds = limit, seconds
        self.idle: dict[Connection, None] = {}

    def make_room(self) -> bool:
        """Close the connection that has been idle longest; returns whether there was one."""
        # Not one with unsent bytes: the system would not free it at once.
        for connection in self.idle:
            if not connection.transport.get_write_buffer_size():
                connection.close()
                return True
        return False


class Connection(H11Protocol):
    """One connection. It ends if a header stays incomplete, and notices a client that leaves.

    uvicorn only limits the time between a response and the next byte.
    """

    def __init__(self, *args: Any, limit: ConnectionLimit, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: RequestParser = RequestParser()
        self._limit, self._ahead, self._rest = limit, 0, 0
        self._deadline: asyncio.TimerHandle | None = None

    def close(self) -> None:
        self._limit.idle.pop(self, None)
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limit.limit and not self._limit.make_room():
            transport.write(BUSY)
            transport.close()
            return
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        ahead = not self._waits() and self.conn.their_state is h11.DONE
        refused = self._waits() and self.conn.their_state is h11.SEND_BODY
        self._rest = self._rest + len(data) if refused else 0
        super().data_received(data)
        if self.transport.is_closing():
            self._end_wait()
        elif self._rest > LINGER_BYTES:
            self.close()
        elif refused and self._waits() and self.conn.their_state is not h11.SEND_BODY:
            self._end_wait()  # the body is complete, and the connection can be used again
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            self._await_next()
        elif self._waits():  # for the rest of a header, or of a body that was refused
            self._await_request()
        else:
            self._end_wait()
            self._ahead += len(data) if ahead else 0
            self._read_on()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP. uvicorn raises where a response has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.refusal or msg)
            if self.cycle is not None:  # its own answer would be a second one
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins to answer a pipelined request
        self._await_next()

    def _await_next(self) -> None:
        """Wait for the next request, after a response."""
        self._ahead = len(self.conn.trailing_data[0])
        if self.transport.is_closing():
            return
        if not self._waits():
            self._read_on()
        elif self._ahead or self.conn.their_state is h11.SEND_BODY:
            self._await_request()
        else:  # uvicorn's own timer runs
            self._limit.idle[self] = None

    def _waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _await_request(self) -> None:
        """Close this connection unless a whole header comes in time, however many bytes come.

        Or the rest of a body whose request was refused.
        """
        self._limit.idle.setdefault(self)
        if self._deadline is None:
            refused = self.conn.their_state is h11.SEND_BODY
            seconds = min(self._limit.seconds, LINGER_SECONDS if refused else math.inf)
            self._deadline = self.loop.call_later(seconds, self.close)

    def _end_wait(self) -> None:
        self._limit.idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _read_on(self) -> None:
        """Read while a request is answered, because only reading shows that the client has left.

        uvicorn stops reading when a client pipelines a second request.
        """
        if self.conn.their_state is not h11.DONE:
            return  # a body, which uvicorn reads as it is consumed
        if self._ahead > AHEAD:
            self.transport.abort()
        else:
            self.flow.resume_reading()


class Server(uvicorn.Server):
    """A server that goes on, and does not flood the log, when the system has no descriptors.

    drain: begins at SIGTERM. lost: whether the engine cannot go on, which ends the server.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain, lost: Callable[[], bool]) -> None:
        super().__init__(config)
        self._drain, self._lost = drain, lost

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain or ends the server; one more ends the answers.

        uvicorn's own second Ctrl-C waits for open connections, from Python 3.12 on.
        """
        if self.should_exit:
            for task in self.server_state.tasks:
                task.get_loop().call_soon_threadsafe(task.cancel)
        elif sig != signal.SIGTERM or not self._drain.begin():
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if self._drain.expired:
            self.config.timeout_graceful_shutdown = 0  # the other answers get an error at once
        return await super().on_tick(counter) or self._drain.over or self._lost()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(Reporter())
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(socket.SOMAXCONN)  # uvicorn's backlog only limits accepting at once


class Reporter:
    """The event loop's exception handler. It reports exhausted descriptors once a minute."""

    def __init__(self) -> None:
        self._reported = -QUIET

    def __call__(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in EXHAUSTED):
            loop.default_exception_handler(dict(context))
        elif time.monotonic() - self._reported >= QUIET:
            self._reported = time.monotonic()
            LOG.warning(
                "new connections wait: %s; raise the limit of open files (ulimit -n)",
                error.strerror,
            )
