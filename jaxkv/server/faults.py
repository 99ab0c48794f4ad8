"""Refusals: an HTTP status with OpenAI's error object."""

from __future__ import annotations

import json
import math
import reprlib

from starlette.responses import Response

TYPES = {401: "authentication_error", 429: "requests"}  # other than invalid_request_error
RETRY = 1, 60  # seconds; clients ignore longer waits

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


class Fault(Exception):
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
            least, most = RETRY
            self.headers["retry-after"] = str(min(most, max(least, math.ceil(retry))))

    @property
    def json(self) -> str:
        """The error object, in ASCII because it may quote invalid text."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": TYPES.get(self.status, kind)}
        return json.dumps({"error": error | {"param": self.param, "code": self.code}})

    def response(self) -> Response:
        return Response(self.json, self.status, self.headers, "application/json")


def shown(value: object) -> str:
    """A short one-line quotation of a value, however long or deep it is."""
    return _short.repr(value)
