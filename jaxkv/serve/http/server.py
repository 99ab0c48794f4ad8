"""A listening socket and a uvicorn server, its settings and its end."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from jaxkv.errors import UserError
from jaxkv.sampling import TEMPERATURE, Sampling
from jaxkv.serve.http.connections import Connection, ConnectionLimit, max_connections
from jaxkv.serve.http.errors import APIError

LOG = logging.getLogger(__name__)
GRACE = 5  # seconds for answers to end when the server stops
IDLE = 75  # seconds of an idle connection: longer than clients wait, so that they close first
REMEDIES = {
    errno.EADDRINUSE: "is in use; choose another --port, or 0 for a free one",
    errno.EACCES: "needs more rights; choose a --port from 1024 on",
    errno.EADDRNOTAVAIL: "is not an address of this machine; choose another --host",
}
ACCEPTED = 4  # connections that asyncio accepts before the limit counts them
LATER = 10.0  # seconds after which a client should ask again, perhaps another server


@dataclass(frozen=True)
class ServerConfig:
    """The limits and settings of a server."""

    max_body: int = 8 * 2**20  # bytes of a body
    max_bodies: int = 256  # that are still coming
    max_in_flight: int = 1024  # answers at a time
    max_per_key: int | None = None  # answers at a time for one API key
    max_batch: int = 1024  # answers that need not wait
    max_waiting_tokens: int = 2**20  # of the prompts of the other answers to a request
    max_unread: int = 4096  # events that a client has not read yet
    max_connections: int | None = None  # None: as many as the limit of open files allows
    # Limits for a client to send its header, to send its body, and to read on.
    header_seconds: float = 5.0
    read_seconds: float = 60.0
    write_seconds: float = 60.0
    comment_seconds: float = 5.0  # between comments in a stream that has no new tokens
    report_cached: bool = True  # cached prompt tokens, which may reveal other users' prompts
    host: str = "127.0.0.1"  # the name or address that the server was told to listen on
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use the server; `*` is all
    metrics_prefix: str = "jaxkv"
    aliases: tuple[str, ...] = ()  # more names of the model
    fingerprint: str = ""  # hash of the model and its settings
    log_probes: bool = False  # log successful requests for /health and /metrics, too
    sampling: Sampling = field(default_factory=lambda: Sampling(TEMPERATURE))  # of requests without


class Drain:
    """Counts the requests that are being answered. seconds: the longest time to finish them."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds, self._end, self._answers = seconds, math.inf, 0

    @property
    def has_begun(self) -> bool:
        return self._end < math.inf

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._end

    @property
    def over(self) -> bool:
        """Whether draining has begun, and all answers are complete or the time is up."""
        return self.has_begun and (not self._answers or self.expired)

    def begin(self) -> bool:
        """Refuse requests from now on; returns False if there is no time, or it has begun."""
        if self.has_begun or self._seconds <= 0:
            return False
        self._end = time.monotonic() + self._seconds
        return True

    def check(self) -> None:
        """Raise APIError if draining has begun."""
        if self.has_begun:
            message = "the server is draining: it finishes its answers and ends; try again later"
            error = APIError(503, message, "server_draining", retry=LATER)
            error.headers["connection"] = "close"  # the next request may reach another server
            raise error

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count one request inside. Raises APIError if draining has begun."""
        self.check()
        self._answers += 1
        try:
            yield
        finally:
            self._answers -= 1


class Server(uvicorn.Server):
    """A server that can drain.

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
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(socket.SOMAXCONN)  # uvicorn's backlog only limits accepting at once


def bind(host: str, port: int, write_seconds: float) -> socket.socket:
    """Bind a socket, which refuses clients until `begin_listening`. port: 0 takes a free one.

    write_seconds: after which the system drops a client that stopped reading, if it supports that.
    Raises UserError if the address is unavailable.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: not a host name at all
        why = error.strerror if isinstance(error, OSError) else "no such name can be"
        raise UserError(f"--host {host!r:.60} is unknown: {why}; try 127.0.0.1") from None
    try:
        return _bound(family, kind, address, write_seconds, shared=False)
    except OSError:
        pass  # perhaps only because connections of an earlier server have just ended
    try:
        return _bound(family, kind, address, write_seconds, shared=os.name == "posix")
    except OSError as error:
        raise _taken(host, port, error) from None


def _bound(
    family: int, kind: int, address: tuple, write_seconds: float, shared: bool
) -> socket.socket:
    """Bind a socket. shared: also if a socket that does not listen yet has this address.

    So a second server learns at once that the first, which may still compile, has its port.
    """
    # asyncio sends small parts at once where the socket names its protocol. Otherwise the system
    # holds the body back after the header, until the client acknowledges: 40 ms on Linux.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    with contextlib.suppress(AttributeError, OSError):
        # Otherwise the system would keep unread data as long as the client likes.
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(write_seconds * 1000)
        )
    try:
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def begin_listening(listener: socket.socket) -> None:
    """Accept clients, which wait for the server. Raises UserError if the port is taken."""
    try:
        if os.name == "posix":  # elsewhere this lets two servers share a port
            # For the next server, while connections of this one end.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        raise _taken(*listener.getsockname()[:2], error) from None


def _taken(host: str, port: int, error: OSError) -> UserError:
    reason = REMEDIES.get(error.errno, f"is unavailable: {error.strerror}; choose another")
    return UserError(f"{host} port {port} {reason}")


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(
    app: ASGIApp,
    config: ServerConfig | None = None,
    drain: Drain | None = None,
    lost: Callable[[], bool] = lambda: False,
) -> Server:
    """A server for `run(sockets=[...])`; it ends at Ctrl-C or when `should_exit` is set.

    drain: begins at SIGTERM. lost: called ten times a second; True ends the server.
    """
    config = config or ServerConfig()
    limit = ConnectionLimit(config.max_connections or max_connections(), config.header_seconds)
    return Server(
        uvicorn.Config(
            app,
            # Fixed, so that production uses what the tests use, whatever else is installed.
            loop="asyncio",
            http=partial(Connection, limit=limit),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application logs errors
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=ACCEPTED,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=GRACE,
        ),
        drain or Drain(),
        lost,
    )
