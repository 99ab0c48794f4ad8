"""The outermost application: gives each request an id, and counts the responses."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv.server.metrics import Metrics

ID = "x-request-id"
VALID = re.compile(r"[!-~]{1,200}")
LEFT = 499  # the status that proxies count when a client leaves before the response begins
HANDLERS = {
    *("/v1/completions", "/v1/chat/completions", "/v1/models"),
    *("/health", "/metrics", "/version"),
}

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # for the log


class Observer:
    """Takes a client's X-Request-ID or makes one, and returns it with every response."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(ID, "")
        name = given if VALID.fullmatch(given) else uuid.uuid4().hex
        status, token = LEFT, REQUEST_ID.set(name)

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (ID.encode(), name.encode())]
                message = message | {"headers": headers}
            await send(message)

        state = scope.setdefault("state", {})
        try:
            await self._app(scope, receive, named)
        finally:
            REQUEST_ID.reset(token)
            self._metrics.respond(handler(scope["path"]), status, state.get("refusal"))


def handler(path: str) -> str:
    """The label of a path: bounded, because clients choose paths."""
    if path.startswith("/v1/models/"):
        return "/v1/models"
    return path if path in HANDLERS else "other"
