"""One answer on its way from the engine's thread to the task that sends it to a client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.serve.engine.request import Outcome, ScoredToken
from jaxkv.serve.http.metrics import Metrics
from jaxkv.serve.http.protocols import DetokenizerProtocol, LanguageProtocol
from jaxkv.serve.http.usage import UsageRecord

FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}  # other reasons are failures


class Piece(NamedTuple):
    """A part of an answer. prompt: `scored` are the tokens of the prompt."""

    index: int
    text: str
    scored: Sequence[ScoredToken] = ()
    prompt: bool = False


class End(NamedTuple):
    """The end of an answer. reason: the engine's, or `slow` if the client read too slowly."""

    index: int
    text: str
    reason: str
    outcome: Outcome


class Hangup(NamedTuple):
    """The client has disconnected."""


Event = Piece | End | Hangup


class Mailbox:
    """A queue of events from any thread to one task. max_unread: unread events of a slow client."""

    def __init__(self, max_unread: float) -> None:
        self._loop, self._max_unread = asyncio.get_running_loop(), max_unread
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> bool:
        """Add an event; returns whether fewer than `max_unread` are unread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the server has stopped, before the engine
            return False
        return self._events.qsize() < self._max_unread

    async def get(self) -> Event:
        return await self._events.get()

    async def get_within(self, seconds: float) -> Event | None:
        """The next event, or None if none comes in time."""
        if not self._events.empty():
            return self._events.get_nowait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._events.get()
        return None


class Choice:
    """The engine's listener for one answer: detokenizes it and ends it at a stop string.

    scored: whether each token is sent with its log probabilities. usage: the record of its request.
    """

    def __init__(
        self,
        index: int,
        detokenizer: DetokenizerProtocol,
        mailbox: Mailbox,
        metrics: Metrics,
        scored: bool,
        usage: UsageRecord,
    ) -> None:
        self._usage = usage
        self._index, self._detokenizer, self._mailbox, self._metrics = (
            index,
            detokenizer,
            mailbox,
            metrics,
        )
        self._scored, self._slow, self._last = scored, False, 0.0

    def prompt(self, scored: list[ScoredToken]) -> None:
        self._mailbox.put(Piece(self._index, "", scored, prompt=True))

    def token(self, scored: ScoredToken) -> bool:
        now = time.perf_counter()
        if self._last:
            self._metrics.between_tokens.observe(now - self._last)
        self._last = now
        self._usage.token(self._index)
        text = self._detokenizer.push(scored.token)
        if text or self._scored:
            piece = Piece(self._index, text, [scored] if self._scored else ())
            self._slow = not self._mailbox.put(piece)
        return self._slow or self._detokenizer.reason == "stop"

    def done(self, outcome: Outcome) -> None:
        text, reason = "", "error"
        try:
            text = self._detokenizer.end(outcome.reason)
            ended = "stop" if self._detokenizer.reason == "stop" else outcome.reason
            reason = "slow" if self._slow else ended
        finally:  # otherwise its client would wait forever
            finished, usage = FINISHED.get(reason, reason), self._usage
            usage.end(self._index, outcome, finished)
            self._mailbox.put(End(self._index, text, reason, outcome))
            self._metrics.add(outcome, finished)
            self._metrics.use(usage.api_key, outcome, usage.is_first(self._index))


class TokenText(NamedTuple):
    """A scored token for a client. offset: of its text in the prompt and answer, in characters."""

    token: bytes
    logprob: float | None
    top: Sequence[tuple[bytes, float]]
    offset: int


class AnswerReader:
    """Turns the events of one answer into text and token scores for a client.

    prompt: its ids. echo: its text if the answer begins with it. offset: the characters of its
    text. scored: whether tokens are sent with their log probabilities.
    """

    def __init__(
        self,
        language: LanguageProtocol,
        prompt: Sequence[int],
        echo: str,
        offset: int,
        scored: bool,
    ) -> None:
        self._language, self._prompt, self._echo = language, prompt, echo
        self._offset = offset
        # Tokens that a stop string holds back or cuts off are reported all the same.
        self._detokenizer = language.detokenizer((), ()) if scored else None

    def read(self, event: Piece | End) -> tuple[str, list[TokenText] | None]:
        """The text of an event, and its tokens if they are scored."""
        text = self._echo if isinstance(event, Piece) and event.prompt else event.text
        if self._detokenizer is None:
            return text, None
        if isinstance(event, End):
            return text, []
        if not event.prompt:
            return text, [self._follow(scored, self._detokenizer) for scored in event.scored]
        tokens, offset = [], 0
        pieces = self._language.pieces(self._prompt)
        for scored, piece in zip(event.scored, pieces, strict=True):
            tokens.append(self._token_text(scored, offset))
            offset += len(piece)
        return text, tokens

    def _follow(self, scored: ScoredToken, detokenizer: DetokenizerProtocol) -> TokenText:
        token = self._token_text(scored, self._offset)
        self._offset += len(detokenizer.push(scored.token))
        return token

    def _token_text(self, scored: ScoredToken, offset: int) -> TokenText:
        top = [(self._language.token_bytes(token), logprob) for token, logprob in scored.top]
        return TokenText(self._language.token_bytes(scored.token), scored.logprob, top, offset)
