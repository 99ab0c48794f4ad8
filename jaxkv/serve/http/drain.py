"""The end of a server: it refuses new requests and finishes those that it answers."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from jaxkv.serve.http.faults import Fault

LATER = 10.0  # seconds after which a client should ask again, perhaps another server


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
        """Raise Fault if draining has begun."""
        if self.has_begun:
            message = "the server is draining: it finishes its answers and ends; try again later"
            fault = Fault(503, message, "server_draining", retry=LATER)
            fault.headers["connection"] = "close"  # the next request may reach another server
            raise fault

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count one request inside. Raises Fault if draining has begun."""
        self.check()
        self._answers += 1
        try:
            yield
        finally:
            self._answers -= 1
