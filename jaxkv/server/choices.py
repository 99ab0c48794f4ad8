"""One answer on its way from the engine's thread to the task that tells it to a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.engine.request import Outcome, Scored
from jaxkv.server.language import Language, Row
from jaxkv.server.metrics import Metrics

FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}  # else the answer has failed


class Piece(NamedTuple):
    """More of an answer. prompt: what is scored is the prompt."""

    index: int
    text: str
    scored: Sequence[Scored] = ()
    prompt: bool = False


class End(NamedTuple):
    """The last of an answer. reason: of the engine's, or `behind` where nobody kept up with it."""

    index: int
    text: str
    reason: str
    outcome: Outcome


class Hangup(NamedTuple):
    """The client is gone."""


Event = Piece | End | Hangup


class Mailbox:
    """Events from any thread for one task, in order.

    most: how many may lie unread; the reader of an answer that nobody takes falls behind.
    """

    def __init__(self, most: float) -> None:
        self._loop, self._most = asyncio.get_running_loop(), most
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> bool:
        """Whether the reader keeps up."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the server has ended, before the engine
            return False
        return self._events.qsize() < self._most

    async def get(self) -> Event:
        return await self._events.get()


class Choice:
    """Listens to the engine for one answer: tokens become text here, and stop strings end it.

    scored: whether each token is told with its log probabilities, and not its text alone.
    """

    def __init__(
        self, index: int, row: Row, mailbox: Mailbox, metrics: Metrics, scored: bool
    ) -> None:
        self._index, self._row, self._mailbox, self._metrics = index, row, mailbox, metrics
        self._scored, self._behind, self._last = scored, False, 0.0

    def prompt(self, scored: list[Scored]) -> None:
        self._mailbox.put(Piece(self._index, "", scored, prompt=True))

    def token(self, scored: Scored) -> bool:
        now = time.perf_counter()
        if self._last:
            self._metrics.between_tokens.observe(now - self._last)
        self._last = now
        text = self._row.push(scored.token)
        if text or self._scored:
            piece = Piece(self._index, text, [scored] if self._scored else ())
            self._behind = not self._mailbox.put(piece)
        return self._behind or self._row.reason == "stop"

    def done(self, outcome: Outcome) -> None:
        text, reason = "", "error"
        try:
            text = self._row.end(outcome.reason)
            ended = "stop" if self._row.reason == "stop" else outcome.reason
            reason = "behind" if self._behind else ended
        finally:  # or its client would wait for ever
            self._mailbox.put(End(self._index, text, reason, outcome))
            self._metrics.add(outcome, FINISHED.get(reason, reason))


class Spelled(NamedTuple):
    """A scored token as clients see it. offset: of its text, in characters of the whole."""

    token: bytes
    logprob: float | None
    top: Sequence[tuple[bytes, float]]
    offset: int


class Reader:
    """What one answer's events say to a client.

    prompt: its ids; echo: its text where the answer begins with it; scored: whether tokens are told
    with their log probabilities.
    """

    def __init__(self, language: Language, prompt: Sequence[int], echo: str, scored: bool) -> None:
        self._language, self._prompt, self._echo = language, prompt, echo
        self._offset = len(echo)
        # What a stop string holds back or cuts off was drawn, and is told, all the same.
        self._row = language.row((), ()) if scored else None

    def read(self, event: Piece | End) -> tuple[str, list[Spelled] | None]:
        """The text, and the tokens where they are told."""
        text = self._echo if isinstance(event, Piece) and event.prompt else event.text
        if self._row is None:
            return text, None
        if isinstance(event, End):
            return text, []
        if not event.prompt:
            return text, [self._follow(scored, self._row) for scored in event.scored]
        told, offset = [], 0
        pieces = self._language.pieces(self._prompt)
        for scored, piece in zip(event.scored, pieces, strict=True):
            told.append(self._told(scored, offset))
            offset += len(piece)
        return text, told

    def _follow(self, scored: Scored, row: Row) -> Spelled:
        told = self._told(scored, self._offset)
        self._offset += len(row.push(scored.token))
        return told

    def _told(self, scored: Scored, offset: int) -> Spelled:
        top = [(self._language.spell(token), logprob) for token, logprob in scored.top]
        return Spelled(self._language.spell(scored.token), scored.logprob, top, offset)
