"""A listening socket and a uvicorn server."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from jaxkv.errors import UserError
from jaxkv.serve.http.connections import (
    ACCEPTED,
    Connection,
    ConnectionLimit,
    Server,
    most_connections,
)
from jaxkv.serve.http.drain import Drain
from jaxkv.serve.http.job import ServerConfig

GRACE = 5  # seconds for answers to end when the server stops
IDLE = 75  # seconds of an idle connection: longer than clients wait, so that they close first
REMEDIES = {
    errno.EADDRINUSE: "is in use; choose another --port, or 0 for a free one",
    errno.EACCES: "needs more rights; choose a --port from 1024 on",
    errno.EADDRNOTAVAIL: "is not an address of this machine; choose another --host",
}


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
    listener = socket.socket(family, kind)
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
    limit = ConnectionLimit(config.max_connections or most_connections(), config.header_seconds)
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
