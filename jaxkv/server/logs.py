"""The log: one line for each warning and error, or JSON, also for each request."""

from __future__ import annotations

import json
import logging
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


def log_text() -> None:
    """Log warnings and errors of this process on standard error."""
    _log_with(logging.Formatter("jaxkv: %(message)s"))


def log_json() -> None:
    """Log every request, warning and error of this process as JSON on standard error."""
    _log_with(JsonFormatter())
    logging.getLogger("jaxkv.server").setLevel(logging.INFO)


def _log_with(formatter: logging.Formatter) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.getLogger().addHandler(handler)
