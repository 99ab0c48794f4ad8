"""Connections of clients: limits that keep idle and broken ones from locking others out.

Requests whose end a proxy may see elsewhere are refused, because they could smuggle another in.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 8192  # because each takes some 20 KB
SPARE = 64  # descriptors that are left for files and for connections on their way
AHEAD = 2**16  # bytes that a client may send beyond the request that is being answered
# The rest of a body whose request was refused is read this long, so that the client, which may not
# read before it has sent everything, gets the response.
LINGER_SECONDS, LINGER_BYTES = 0.5, 2**20
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: 0\r\n\r\n"
)
HEADER = 2**16  # bytes of a header, and of the line before a chunk
OVERHEAD = 2**16  # bytes of a body's framing, besides PER_BYTE of each of its bytes
PER_BYTE = 6  # bytes of framing: a chunk of one byte has five


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, where the system allows it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # absent on Windows

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except ValueError:  # macOS: its hard limit is infinite, and its largest soft limit is this
            resource.setrlimit(resource.RLIMIT_NOFILE, (10240, hard))


def max_connections() -> int:
    """The connections that fit under the limit of open files, at most MAX_CONNECTIONS."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):
        return MAX_CONNECTIONS
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, limit - used - min(SPARE, limit // 4)))


class RequestParser(h11.Connection):
    """h11's parser, which also refuses two lengths of one body, and endless chunk extensions.

    h11 refuses a Content-Length of other characters than digits or unlike another, transfer codings
    other than chunked, and control characters. It joins folded lines, as RFC 9112 5.2 allows.
    refusal: why the bytes were refused, for the response.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEADER)
        self.refusal = ""
        self._received = self._body = 0  # bytes of the body that is coming, with and without chunks

    def receive_data(self, data: bytes) -> None:
        if self.their_state is h11.SEND_BODY:
            self._received += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """The next event. Raises h11.RemoteProtocolError for bytes that are refused."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._received = self._body = 0
                _check_length(event)
            elif isinstance(event, h11.Data):
                self._body += len(event.data)
            long = self._received - self._body > OVERHEAD + PER_BYTE * self._body
            if event is h11.NEED_DATA and long:  # all that was received is parsed
                raise h11.RemoteProtocolError("the chunks of a body have too long extensions")
        except h11.RemoteProtocolError as error:
            self.refusal = str(error)
            raise
        return event


def _check_length(request: h11.Request) -> None:
    """Raise for two lengths of one body (RFC 9112 6.3), and for chunks in HTTP/1.0 (6.1)."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, not both")
    if request.http_version < b"1.1":
        raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding; send a Content-Length")


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
