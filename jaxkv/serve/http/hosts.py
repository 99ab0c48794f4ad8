"""Which host names and web pages may use a server without API keys.

A web page of any site can send requests to the user's machine. With DNS rebinding it may even read
the answers: the name of its site then resolves to 127.0.0.1. The Host header still has that name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxkv.serve.http.api_keys import OPEN, ApiKeys
from jaxkv.serve.http.faults import Fault, shown

LOCAL = {"localhost", "127.0.0.1", "::1"}
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/@?#\s]+)(?::\d*)?")


class HostMiddleware:
    """Middleware: without API keys, serves only the server's own names and web pages.

    host: the configured name. origins: web pages of other sites that may use the server; `*` is
    all. With API keys nothing is refused, because no other site knows a key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, host: str, origins: Collection[str]) -> None:
        self._app, self._keys, self._origins = app, keys, origins
        self._hosts = LOCAL | {host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in OPEN and not self._keys.tenants
        try:
            if guarded:
                self._check(scope, Headers(scope=scope))
        except Fault as fault:
            await fault.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise Fault for another Host, or another Origin than that host."""
        host = headers.get("host", "")
        # DNS rebinding needs a name, so the address of this connection is safe.
        local = (scope.get("server") or ("localhost",))[0].removeprefix("::ffff:").partition("%")[0]
        if hostname(host) not in self._hosts | {local}:
            raise Fault(
                421,
                "a server without API keys answers requests to localhost or its --host, got Host "
                f"{shown(host)}; start it with --api-key-file",
                "unknown_host",
            )
        origin = headers.get("origin")
        if origin is None or not {origin, "*"}.isdisjoint(self._origins):
            return
        if not is_origin(origin.lower()) or urlsplit(origin).netloc.lower() != host.lower():
            raise Fault(
                403,
                f"web pages of {shown(origin)} may not use this server; add it to "
                "--allowed-origins",
                "unknown_origin",
            )


def hostname(host: str) -> str:
    """The name in a Host header, without the port and the brackets; empty if it is invalid."""
    match = HOST.fullmatch(host.lower())
    return match[1].strip("[]") if match else ""


def is_origin(text: str) -> bool:
    """Whether a text is what a browser sends as Origin: a scheme, a host and perhaps a port."""
    try:
        parts = urlsplit(text)
        return text == f"{parts.scheme}://{parts.netloc}".lower() and bool(hostname(parts.netloc))
    except ValueError:
        return False
