"""Notices a step of the engine that does not end, such as a call of a broken device."""

from __future__ import annotations

import math
import time


class StepWatch:
    """A context around each step. seconds: the longest time that a step may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._latest = seconds, math.inf

    def __enter__(self) -> None:
        self._latest = time.monotonic() + self._seconds

    def __exit__(self, *_: object) -> None:
        self._latest = math.inf

    @property
    def stalled(self) -> str:
        """That the step takes too long, in words; empty if it does not. From any thread."""
        late = time.monotonic() > self._latest
        return f"a step has taken more than {self._seconds:g} s" if late else ""
