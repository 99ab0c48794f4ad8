"""A socket, and uvicorn behind it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

import uvicorn
from starlette.applications import Starlette

from jaxkv.errors import UserError

GRACE = 5  # seconds that answers have to end when the server does
IDLE = 75  # seconds that a connection is kept: longer than clients keep theirs, who so close first
REMEDIES = {
    errno.EADDRINUSE: "is in use; choose another --port, or 0 for a free one",
    errno.EACCES: "needs more rights; choose a --port from 1024 on",
    errno.EADDRNOTAVAIL: "is not an address of this machine; choose another --host",
}


def bind(host: str, port: int, write_seconds: float) -> socket.socket:
    """A socket for `begin_listening`; who comes before that is refused. port: 0 takes a free one.

    write_seconds: after which the connection of a client that stopped reading is dropped, where
    the system can do that.
    Raises UserError where the address is not to be had.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:  # a name may be none to begin with
        why = error.strerror if isinstance(error, OSError) else "no such name can be"
        raise UserError(f"--host {host!r:.60} is unknown: {why}; try 127.0.0.1") from None
    listener = socket.socket(family, kind)
    with contextlib.suppress(AttributeError, OSError):
        # Else what such a client never read would be kept for as long as it likes.
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(write_seconds * 1000)
        )
    try:
        if os.name == "posix":  # elsewhere this lets two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from None
    return listener


def begin_listening(listener: socket.socket) -> None:
    """From now on whoever comes waits for the server. Raises UserError where another one does."""
    try:
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        raise _taken(*listener.getsockname()[:2], error) from None


def _taken(host: str, port: int, error: OSError) -> UserError:
    what = REMEDIES.get(error.errno, f"cannot be had: {error.strerror}; choose another")
    return UserError(f"{host} port {port} {what}")


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_of(app: Starlette) -> uvicorn.Server:
    """A server for `run(sockets=[...])`, which ends at Ctrl-C or when `should_exit` is set."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            # What the tests run is what is served, whatever else is installed.
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application says what went wrong
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=GRACE,
        )
    )
