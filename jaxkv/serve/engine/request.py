"""Requests to the engine, and what it reports while it answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from numbers import Real
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxkv.errors import UserError, is_whole
from jaxkv.sampling import LARGEST, Sampling
from jaxkv.typing import Bool

MAX_LOGPROBS = 20  # likeliest tokens that a request may ask for


class ScoredToken(NamedTuple):
    """One token with its log probability under the model.

    logprob: natural log of its probability before temperature, filters and penalties; None for the
    first token of a prompt, which nothing predicts, and if the request wants none. top: the
    likeliest tokens with their log probabilities, best first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@runtime_checkable
class MatcherProtocol(Protocol):
    """How far one answer obeys a grammar. ended: no token may follow."""

    ended: bool

    def copy(self) -> MatcherProtocol:
        """A matcher at the same place, for another answer."""

    def allowed(self) -> Bool[np.ndarray, " V"]:
        """Which tokens may come next. Raises UserError if that takes too long."""

    def advance(self, token: int) -> None:
        """Add a token to the answer. Raises UserError for one that is not allowed."""


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    tokens: the prompt.
    max_new_tokens: 0 only scores the prompt.
    min_new_tokens: minimum number of new tokens before one of `eos` is allowed.
    sampling: how tokens are drawn; a draw depends on `seed` and position alone.
    presence_penalty, frequency_penalty: subtracted from the logit of a token in the answer, once,
      and for each occurrence.
    bias: pairs of a token and a number added to its logit.
    eos: ids that end the answer.
    salt: only requests of equal salt share prefixes and the policies' random draws; None is a salt
      too.
    owner: the sender of the request; the queue serves owners in turn.
    logprobs: how many of the likeliest tokens to report with each token; None reports no log
      probabilities.
    echo: also score the prompt's tokens, without using the prefix cache.
    matcher: of this answer alone; tokens that it does not allow are not drawn.
    Raises UserError for a request that no engine could answer.
    """

    tokens: tuple[int, ...]
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    eos: tuple[int, ...] = ()
    salt: str | None = None
    owner: str | None = None
    logprobs: int | None = None
    echo: bool = False
    min_new_tokens: int = 0
    matcher: MatcherProtocol | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if not self.tokens:
            raise UserError("a prompt must have at least one token, got none; give some text")
        if self.max_new_tokens < 0:
            raise UserError(f"max_new_tokens must be 0 or more, got {self.max_new_tokens}; give 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"min_new_tokens must be from 0 to max_new_tokens, got {self.min_new_tokens} and "
                f"{self.max_new_tokens}; give fewer"
            )
        if self.matcher is not None and self.min_new_tokens:
            raise UserError(
                f"an answer that obeys a grammar may end early, got min_new_tokens "
                f"{self.min_new_tokens}; leave it out"
            )
        if not 0 <= self.seed < 2**32:
            raise UserError(f"a seed must be from 0 to {2**32 - 1}, got {self.seed}; give 0")
        numbers = (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
            *(("bias", value) for _, value in self.bias),
        )
        for name, value in numbers:
            if not abs(value) <= LARGEST:
                raise UserError(f"{name} must be a finite number, got {value}; leave it out for 0")
        if self.salt == "" or not is_unicode(self.salt or ""):
            raise UserError(
                f"salt must be Unicode text, got {self.salt!r:.60}; leave it out for none"
            )


def _check_types(request: Request) -> None:
    """Raise UserError for types that would fail later, in the engine's thread."""
    rules = (
        ("tokens", _are_whole(request.tokens), "a tuple of whole numbers"),
        ("eos", _are_whole(request.eos), "a tuple of whole numbers"),
        ("max_new_tokens", is_whole(request.max_new_tokens), "a whole number"),
        ("min_new_tokens", is_whole(request.min_new_tokens), "a whole number"),
        ("seed", is_whole(request.seed), "a whole number"),
        (
            "logprobs",
            request.logprobs is None or is_whole(request.logprobs),
            "a whole number or None",
        ),
        ("sampling", isinstance(request.sampling, Sampling), "a Sampling"),
        ("salt", isinstance(request.salt, str | None), "a text or None"),
        ("owner", isinstance(request.owner, str | None), "a text or None"),
        ("presence_penalty", isinstance(request.presence_penalty, Real), "a number"),
        ("frequency_penalty", isinstance(request.frequency_penalty, Real), "a number"),
        ("echo", isinstance(request.echo, bool), "True or False"),
        (
            "bias",
            isinstance(request.bias, tuple)
            and all(
                isinstance(pair, tuple)
                and len(pair) == 2
                and is_whole(pair[0])
                and isinstance(pair[1], Real)
                for pair in request.bias
            ),
            "a tuple of (token, number)",
        ),
    )
    for name, holds, rule in rules:
        if not holds:
            raise UserError(f"{name} must be {rule}, got {getattr(request, name)!r:.60}; give one")


def _are_whole(values: object) -> bool:
    return isinstance(values, tuple) and all(map(is_whole, values))


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8: one with a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_request(request: Request, max_len: int | None, vocab: int) -> None:
    """Raise UserError for a request that exceeds max_len tokens, or ids from `vocab` on."""
    size, new = len(request.tokens), request.max_new_tokens
    if not 0 <= min(request.tokens) <= max(request.tokens) < vocab:
        raise UserError(
            f"token ids must be from 0 to {vocab - 1}, got {min(request.tokens)} to "
            f"{max(request.tokens)}; give ids of the model's tokenizer"
        )
    if max_len is not None and size + new > max_len:
        raise UserError(
            f"max_len is {max_len} tokens, got {size} of prompt and {new} new ones; "
            "shorten one of them"
        )
    max_logprobs = min(MAX_LOGPROBS, vocab)
    if request.logprobs is not None and not 0 <= request.logprobs <= max_logprobs:
        raise UserError(
            f"logprobs must be from 0 to {max_logprobs}, got {request.logprobs}; give fewer"
        )
    wrong = next((token for token, _ in request.bias if not 0 <= token < vocab), None)
    if wrong is not None:
        raise UserError(
            f"biased tokens must be from 0 to {vocab - 1}, got {wrong}; "
            "give ids of the model's tokenizer"
        )


@dataclass(frozen=True)
class Outcome:
    """The end of an answer.

    reason: eos, stop, length, cancelled, error, or refused if its matcher could not go on.
    computed_tokens, cached_tokens: prompt tokens that were computed, and taken from the prefix
      cache; fewer than all after a cancellation.
    queue_seconds, first_token_seconds, total_seconds: time from the arrival of the request to its
      start, its first token and its end; None for events that did not happen.
    error: the message if the reason is `error` or `refused`.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float
    computed_tokens: int
    error: str = ""


@runtime_checkable
class Listener(Protocol):
    """The receiver of one answer. The engine's thread calls its methods, which must not block.

    An exception in one of them ends this answer, and no other, with the reason `error`.
    """

    def prompt(self, scored: list[ScoredToken]) -> None:
        """Receive the prompt's tokens if the request has `echo`; before the first new token."""

    def token(self, scored: ScoredToken) -> bool:
        """Receive a new token, also an eos; return True to end the answer with reason `stop`."""

    def done(self, outcome: Outcome) -> None:
        """Receive the outcome; always called once, last."""


class Overloaded(Exception):
    """The engine accepts no more requests now. seconds: after which to retry."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(eq=False)
class RequestHandle:
    """One submitted request.

    dispatched, generated: new tokens requested from the device, and delivered to the listener.
    matched: new tokens that its matcher knows. failure: why its matcher cannot go on.
    cached, computed: prompt tokens. queue_seconds, first_token_seconds: since its arrival.
    """

    request: Request
    listener: Listener
    arrival: float
    cancelled: bool = False
    finished: bool = False
    dispatched: int = 0
    generated: int = 0
    matched: int = 0
    failure: str = ""
    cached: int = 0
    computed: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    prompt_scores: list[ScoredToken] = field(default_factory=list)

    @property
    def wants_more(self) -> bool:
        """Whether another token is to be drawn."""
        matcher = self.request.matcher
        obeys = matcher is None or not (self.failure or matcher.ended)
        return obeys and self.dispatched < self.request.max_new_tokens

    def match(self, token: int) -> None:
        """Tell the matcher the next token of the answer."""
        self.matched += 1
        try:
            self.request.matcher.advance(token)
        except Exception as error:  # it must not end the answers of others
            self.failure = str(error)

    def allowed(self) -> Bool[np.ndarray, " V"] | None:
        """Which tokens the matcher allows next; None for all."""
        if self.request.matcher is None:
            return None
        try:
            return self.request.matcher.allowed()
        except Exception as error:
            self.failure = str(error)
            return None

    def outcome(self, reason: str, error: str = "") -> Outcome:
        """The outcome of a request that ends now."""
        return Outcome(
            reason,
            len(self.request.tokens),
            self.cached,
            self.generated,
            self.queue_seconds,
            self.first_token_seconds,
            time.monotonic() - self.arrival,
            self.computed,
            error,
        )
