"""The log of a server, and the middleware that names, counts and logs each request."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv.serve.http.metrics import Metrics

LOG = logging.getLogger(__name__)
ID = "x-request-id"
VALID = re.compile(r"[!-~]{1,200}")
LEFT = 499  # the status that proxies count when a client leaves before the response begins
PROBES = {"/health", "/metrics"}  # which monitors ask for every few seconds
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")


class JsonFormatter(logging.Formatter):
    """A record as one JSON object. `extra={"fields": {...}}` adds names and values."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if REQUEST_ID.get():
            entry["request_id"] = REQUEST_ID.get()
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


@contextlib.contextmanager
def log_as(form: str) -> Iterator[None]:
    """Inside, this process logs to standard error: "text" is a line for each warning and error.

    "json" is one object for each warning, error and request.
    """
    handler, requests = logging.StreamHandler(), logging.getLogger("jaxkv.serve.http")
    as_json, before = form == "json", requests.level
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("jaxkv: %(message)s"))
    logging.getLogger().addHandler(handler)
    requests.setLevel(logging.INFO if as_json else before)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        requests.setLevel(before)


class AccessLogMiddleware:
    """The outermost application. It takes a client's X-Request-ID or makes one, and returns it with
    every response.

    paths: of its routes, by which requests are counted. log_probes: also log the requests for
    PROBES that succeed.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, paths: Collection[str], log_probes: bool = False
    ) -> None:
        self._app, self._metrics, self._log_probes = app, metrics, log_probes
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = Headers(scope=scope).get(ID, "")
        name = header if VALID.fullmatch(header) else uuid.uuid4().hex
        status, token, start = LEFT, REQUEST_ID.set(name), time.perf_counter()

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
            refusal = state.get("refusal")
            self._metrics.respond(self._handler(scope["path"]), status, refusal)
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.perf_counter() - start, 6),
            }
            # Neither texts nor keys: the log may be read by others than their owners.
            if (tenant := state.get("tenant")) is not None and tenant.name:
                fields["api_key"] = tenant.name
            if (usage := state.get("usage")) is not None:
                fields |= usage.fields()
            if refusal:
                fields["refusal"] = refusal
            if self._log_probes or status != 200 or scope["path"] not in PROBES:
                LOG.info("request", extra={"fields": fields})
            REQUEST_ID.reset(token)

    def _handler(self, path: str) -> str:
        """The label of a path: bounded, because clients choose paths."""
        if path.startswith("/v1/models/"):
            return "/v1/models"
        return path if path in self._paths else "other"
