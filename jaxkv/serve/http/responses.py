"""One answer on its way from the engine's thread to the JSON that a client gets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxkv.serve.engine.request import Outcome, ScoredToken
from jaxkv.serve.http.metrics import Metrics, UsageRecord
from jaxkv.serve.http.protocols import DetokenizerProtocol, LanguageProtocol
from jaxkv.serve.http.response_template import TemplateParser
from jaxkv.serve.http.tools import AnswerParser, Call, Content, Part, Thought

Json = dict[str, Any]
FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}  # other reasons are failures
MIN_LOGPROB = -9999.0  # stands for -inf, which JSON lacks


class Delta(NamedTuple):
    """A part of an answer. prompt: `scored` are the tokens of the prompt. tokens: that came since
    the last part.
    """

    index: int
    text: str
    scored: Sequence[ScoredToken] = ()
    prompt: bool = False
    tokens: int = 0


class Finish(NamedTuple):
    """The end of an answer. reason: the engine's, or `slow` if the client read too slowly. tokens:
    that came since the last part.
    """

    index: int
    text: str
    reason: str
    outcome: Outcome
    tokens: int = 0


class Disconnect(NamedTuple):
    """The client has disconnected."""


Event = Delta | Finish | Disconnect


class EventQueue:
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

    async def get(self, seconds: float | None = None) -> Event | None:
        """The next event, or None if none comes within `seconds`."""
        if not self._events.empty():
            return self._events.get_nowait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._events.get()
        return None


@dataclass
class ChoiceListener:
    """The engine's listener for one answer: detokenizes it and ends it at a stop string.

    index: the number of the answer in its request.
    scored: whether each token is sent with its log probabilities.
    usage: the record of its request.
    """

    index: int
    detokenizer: DetokenizerProtocol
    events: EventQueue
    metrics: Metrics
    scored: bool
    usage: UsageRecord
    _slow: bool = field(default=False, init=False)
    _last: float = field(default=0.0, init=False)  # when the last token came
    _tokens: int = field(default=0, init=False)  # since the last part

    def prompt(self, scored: list[ScoredToken]) -> None:
        self.events.put(Delta(self.index, "", scored, prompt=True))

    def token(self, scored: ScoredToken) -> bool:
        now = time.perf_counter()
        if self._last:
            self.metrics.between_tokens.observe(now - self._last)
        self._last = now
        self.usage.token(self.index)
        text = self.detokenizer.push(scored.token)
        self._tokens += 1
        if text or self.scored:
            scores = [scored] if self.scored else ()
            self._slow = not self.events.put(Delta(self.index, text, scores, tokens=self._tokens))
            self._tokens = 0
        return self._slow or self.detokenizer.reason == "stop"

    def done(self, outcome: Outcome) -> None:
        text, reason = "", "error"
        try:
            text = self.detokenizer.end(outcome.reason)
            ended = "stop" if self.detokenizer.reason == "stop" else outcome.reason
            reason = "slow" if self._slow else ended
        finally:  # otherwise its client would wait forever
            finish_reason = FINISHED.get(reason, reason)
            self.usage.end(self.index, outcome, finish_reason)
            self.events.put(Finish(self.index, text, reason, outcome, self._tokens))
            self.metrics.add(outcome, finish_reason)
            self.metrics.use(self.usage.api_key, outcome, self.usage.is_first(self.index))


class AnswerDivider:
    """Divides the events of one answer into parts. thought_tokens: tokens of its thoughts so far,
    without the marks around them.
    """

    def __init__(self, parser: AnswerParser | TemplateParser) -> None:
        self._parser, self.thought_tokens = parser, 0
        self._undecided = 0  # tokens that are of the thought unless they begin the mark after it

    @property
    def called(self) -> bool:
        """Whether the answer has called a tool."""
        return self._parser.called

    def push(self, event: Delta | Finish) -> list[Part]:
        """The parts that are certain with one more event."""
        thinking, last = self._parser.thinking, isinstance(event, Finish)
        parts = self._parser.push(event.text, last, last and event.reason == "length")
        self._undecided += event.tokens
        if not self._parser.undecided or not self._parser.thinking:
            self.thought_tokens += self._undecided * (thinking and self._parser.thinking)
            self._undecided = 0
        return parts


class TokenText(NamedTuple):
    """A scored token for a client. offset: of its text in the prompt and answer, in characters."""

    token: bytes
    logprob: float | None
    top: Sequence[tuple[bytes, float]]
    offset: int


class ChoiceReader:
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

    def read(self, event: Delta | Finish) -> tuple[str, list[TokenText] | None]:
        """The text of an event, and its tokens if they are scored."""
        text = self._echo if isinstance(event, Delta) and event.prompt else event.text
        if self._detokenizer is None:
            return text, None
        if isinstance(event, Finish):
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


Make = Callable[[int, str, Json | None, str | None], Json]


@dataclass(frozen=True)
class ResponseFormat:
    """The response format of one route.

    choice, delta: make one answer, and a part of one, from its index, text, log probabilities and
    finish_reason.
    """

    kind: str  # the route, which decides the fields of requests
    prefix: str  # the beginning of response ids
    answer: str  # the name of the response object
    chunk: str  # the name of a streamed part of it
    default_tokens: int  # limit of new tokens if a request sets none
    choice: Make
    delta: Make
    opening: Callable[[int], Json] | None  # makes the part before the text
    logprobs: Callable[[Sequence[TokenText]], Json]  # of an answer's tokens

    @property
    def is_chat(self) -> bool:
        """Whether a request has messages."""
        return self.kind != "completions"


def choice_of(index: int, logprobs: Json | None, reason: str | None, **content: Any) -> Json:
    return {"index": index} | content | {"logprobs": logprobs, "finish_reason": reason}


def _text(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return choice_of(index, logprobs, reason, text=text)


def _message(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return choice_of(index, logprobs, reason, message=parsed_message([Content(text)]))


def _delta(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return choice_of(index, logprobs, reason, delta={"content": text} if text else {})


def parsed_message(parts: Sequence[Part]) -> Json:
    """The message of an answer that was divided into parts."""
    by_kind = lambda kind: [part for part in parts if isinstance(part, kind)]
    thoughts, texts = ("".join(p.text for p in by_kind(kind)) for kind in (Thought, Content))
    calls = [
        {"id": call.id, "type": "function"}
        | {"function": {"name": call.name, "arguments": call.arguments}}
        for call in by_kind(Call)
    ]
    message: Json = {"role": "assistant", "content": texts if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = thoughts
    return message | {"refusal": None} | ({"tool_calls": calls} if calls else {})


def part_deltas(part: Part) -> list[Json]:
    """The deltas of one part: a call has its name first, and then its arguments."""
    if not isinstance(part, Call):
        return [{"reasoning_content" if isinstance(part, Thought) else "content": part.text}]
    begin = {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
    calls = (begin, {"function": {"arguments": part.arguments}})
    return [{"tool_calls": [{"index": part.number} | call]} for call in calls]


def _role(index: int) -> Json:
    return choice_of(index, None, None, delta={"role": "assistant", "content": ""})


def _columns(tokens: Sequence[TokenText]) -> Json:
    return {
        "tokens": [_text_of(scored.token) for scored in tokens],
        "token_logprobs": [_finite(scored.logprob) for scored in tokens],
        "top_logprobs": [_top(scored) for scored in tokens],
        "text_offset": [scored.offset for scored in tokens],
    }


def _top(tokens: TokenText) -> dict[str, float] | None:
    """The likeliest tokens and the token itself by text; of equal texts the likelier."""
    if tokens.logprob is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in [*tokens.top, (tokens.token, tokens.logprob)]:
        top.setdefault(_text_of(token), _finite(logprob))
    return top


def _entries(tokens: Sequence[TokenText]) -> Json:
    def entry(token: bytes, logprob: float | None) -> Json:
        return {"token": _text_of(token), "logprob": _finite(logprob), "bytes": list(token)}

    content = [
        entry(scored.token, scored.logprob)
        | {"top_logprobs": [entry(*alternative) for alternative in scored.top]}
        for scored in tokens
    ]
    return {"content": content, "refusal": None}


def _text_of(token: bytes) -> str:
    """A token's text; an incomplete character is written as bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


COMPLETION = ResponseFormat(
    "completions", "cmpl-", "text_completion", "text_completion", 16, _text, _text, None, _columns
)
CHAT = ResponseFormat(
    "chat", "chatcmpl-", "chat.completion", "chat.completion.chunk", 4096, _message, _delta,
    _role, _entries,
)  # fmt: skip
RESPONSE = dataclasses.replace(CHAT, kind="responses", prefix="resp_")


def usage(
    outcomes: Sequence[Outcome], n: int, report_cached: bool, thought_tokens: int | None = None
) -> Json:
    """Token counts of all answers; the n answers to a prompt count its tokens once.

    thought_tokens: of all answers; None where they have no thoughts.
    """
    prompts = outcomes[::n]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in prompts)
    new = sum(outcome.new_tokens for outcome in outcomes)
    counts: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
    }
    if report_cached:
        cached = sum(outcome.cached_tokens for outcome in prompts)
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    if thought_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": thought_tokens}
    return counts
