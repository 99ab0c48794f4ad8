"""Answers for whoever wants them whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from jaxkv.engine.engine import Engine, Ticket
from jaxkv.engine.request import Outcome, Overloaded, Request, Scored


class Collected:
    """A listener that keeps all it is told. over: set once nothing follows."""

    def __init__(self) -> None:
        self.echoed: list[Scored] = []
        self.scored: list[Scored] = []
        self.outcome: Outcome | None = None
        self.over = threading.Event()

    @property
    def tokens(self) -> list[int]:
        """The new ones."""
        return [scored.token for scored in self.scored]

    def prompt(self, scored: list[Scored]) -> None:
        self.echoed = list(scored)

    def token(self, scored: Scored) -> bool:
        self.scored.append(scored)
        return False

    def done(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.over.set()


def answer(engine: Engine, requests: Iterable[Request]) -> list[Collected]:
    """All of these, answered to the end: as many at once as the engine's queue takes.

    Takes turns itself where the engine has no thread. Raises what `Engine.submit` does, but that
    the queue is full, and then those that were submitted are cancelled.
    """
    collected, tickets = [], []
    try:
        for request in requests:
            collected.append(Collected())
            tickets.append(_submit(engine, request, collected[-1]))
    except BaseException:
        for ticket in tickets:
            engine.cancel(ticket)
        raise
    while not all(one.over.is_set() for one in collected):
        _go_on(engine)
    return collected


def _submit(engine: Engine, request: Request, listener: Collected) -> Ticket:
    while True:
        try:
            return engine.submit(request, listener)
        except Overloaded:
            if not engine.healthy:
                raise
            _go_on(engine)


def _go_on(engine: Engine) -> None:
    if engine.started:
        time.sleep(0.001)
    else:
        engine.step()
