"""Whole answers instead of token streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from jaxkv.serve.engine.engine import Engine
from jaxkv.serve.engine.handle import RequestHandle
from jaxkv.serve.engine.request import Outcome, Overloaded, Request, ScoredToken


class Collected:
    """A listener that stores a whole answer. finished: set at its end."""

    def __init__(self) -> None:
        self.echoed: list[ScoredToken] = []
        self.scored: list[ScoredToken] = []
        self.outcome: Outcome | None = None
        self.finished = threading.Event()

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return [scored.token for scored in self.scored]

    def prompt(self, scored: list[ScoredToken]) -> None:
        self.echoed = list(scored)

    def token(self, scored: ScoredToken) -> bool:
        self.scored.append(scored)
        return False

    def done(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.finished.set()


def answer(engine: Engine, requests: Iterable[Request]) -> list[Collected]:
    """Answer all requests, as many at once as the engine's queue takes.

    Steps the engine itself if it has no thread. Raises the errors of `Engine.submit` except a full
    queue, and then cancels the requests submitted before.
    """
    collected, handles = [], []
    try:
        for request in requests:
            collected.append(Collected())
            handles.append(_submit(engine, request, collected[-1]))
    except BaseException:
        for handle in handles:
            engine.cancel(handle)
        raise
    while not all(entry.finished.is_set() for entry in collected):
        _advance(engine)
    return collected


def _submit(engine: Engine, request: Request, listener: Collected) -> RequestHandle:
    while True:
        try:
            return engine.submit(request, listener)
        except Overloaded:
            if not engine.healthy:
                raise
            _advance(engine)


def _advance(engine: Engine) -> None:
    if engine.started:
        time.sleep(0.001)
    else:
        engine.step()
