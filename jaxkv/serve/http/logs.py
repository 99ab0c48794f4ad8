"""The log: one line for each warning and error, or JSON, also for each request."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime

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
