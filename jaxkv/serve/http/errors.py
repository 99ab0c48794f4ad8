"""Refusals: an HTTP status with OpenAI's error object."""

from __future__ import annotations

import json
import math
import reprlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

TYPES = {401: "authentication_error", 429: "requests"}  # other than invalid_request_error
# The reason of a refusal without a code, for the metrics; others are invalid_request.
REASONS = {
    404: "unknown_route",
    405: "unknown_route",
    408: "body_too_slow",
    413: "body_too_large",
    415: "unsupported_body",
    500: "server_error",
}
RETRY = 1, 60  # seconds; clients ignore longer waits

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


class APIError(Exception):
    """A refusal. code: for programs. param: the wrong field. retry: seconds to wait first."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry: float | None = None,
    ) -> None:
        super().__init__(" ".join(message.split()))
        self.status, self.code, self.param = status, code, param
        self.headers: dict[str, str] = {}
        if retry is not None:
            minimum, maximum = RETRY
            self.headers["retry-after"] = str(min(maximum, max(minimum, math.ceil(retry))))

    @property
    def json(self) -> str:
        """The error object, in ASCII because it may quote invalid text."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": TYPES.get(self.status, kind)}
        return json.dumps({"error": error | {"param": self.param, "code": self.code}})


class ErrorResponse(Response):
    """The response to an APIError. It leaves the reason in `state`, for the metrics."""

    def __init__(self, error: APIError) -> None:
        super().__init__(error.json, error.status, error.headers, "application/json")
        self._reason = error.code or REASONS.get(error.status, "invalid_request")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["refusal"] = self._reason
        await super().__call__(scope, receive, send)


def engine_unhealthy() -> APIError:
    return APIError(503, "the engine does not answer; restart the server", "engine_unhealthy")


def server_failed() -> APIError:
    """The answer to a request that met a bug; the log has the traceback."""
    return APIError(500, "the server failed; its standard error says why")


def shown(value: object) -> str:
    """A short one-line quotation of a value, however long or deep it is."""
    if value is None or type(value) is bool:
        return json.dumps(value)
    return _short.repr(value)
