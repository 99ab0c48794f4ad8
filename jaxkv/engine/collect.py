"""Answers for whoever wants them whole."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Outcome, Request, Scored


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
    """All of these at once, answered to the end; in turns of ours where the engine has no thread.

    Raises what `Engine.submit` does.
    """
    collected, tickets = [], []
    try:
        for request in requests:
            collected.append(Collected())
            tickets.append(engine.submit(request, collected[-1]))
    except Exception:
        for ticket in tickets:
            engine.cancel(ticket)
        raise
    if engine.started:
        for one in collected:
            one.over.wait()
    else:
        while engine.step():
            pass
    return collected
