"""What is asked of the engine, and what it tells while it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import NamedTuple, Protocol, runtime_checkable

from jaxkv.errors import UserError, is_whole
from jaxkv.sampling import MOST, Sampling

REASONS = ("eos", "stop", "length", "cancelled", "error")  # why an answer ended


class Scored(NamedTuple):
    """One token with what the model gave it.

    logprob: natural log of its probability before temperature, filters and penalties; None of the
    first token of a prompt, which nothing predicts, and where nobody asked. top: the likeliest
    tokens with theirs, best first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Request:
    """One answer that is wanted.

    tokens: the prompt. max_new_tokens: 0 only scores the prompt. sampling: how tokens are drawn,
    by `seed` and position alone. presence_penalty, frequency_penalty: taken off the logit of a
    token that the answer holds already, once and for each time. bias: (token, what is added to its
    logit). eos: ids that end the answer. salt: requests of one salt share
    prefixes and the draws of policies, those of another never do; None is a salt too. logprobs:
    how many of the likeliest tokens to tell beside each; None tells no log probability at all.
    echo: the prompt's tokens are scored as well, from the first on, whatever of it is cached.
    Raises UserError for what can be no request whatever the engine.
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
    logprobs: int | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        if not self.tokens:
            raise UserError("a prompt must hold at least one token, got none; give some text")
        if self.max_new_tokens < 0:
            raise UserError(f"max_new_tokens must be 0 or more, got {self.max_new_tokens}; give 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"a seed must be from 0 to {2**32 - 1}, got {self.seed}; give 0")
        numbers = (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
            *(("bias", value) for _, value in self.bias),
        )
        for name, value in numbers:
            if not abs(value) <= MOST:
                raise UserError(f"{name} must be a finite number, got {value}; leave it out for 0")
        if self.salt == "" or not is_unicode(self.salt or ""):
            raise UserError(
                f"a salt must be some Unicode text, got {self.salt!r:.60}; leave it out for none"
            )


def _check_types(request: Request) -> None:
    """Raise UserError for what would otherwise fail in the engine, where others wait."""
    rules = (
        ("tokens", _are_whole(request.tokens), "a tuple of whole numbers"),
        ("eos", _are_whole(request.eos), "a tuple of whole numbers"),
        ("max_new_tokens", is_whole(request.max_new_tokens), "a whole number"),
        ("seed", is_whole(request.seed), "a whole number"),
        ("logprobs", request.logprobs is None or is_whole(request.logprobs),
         "a whole number or None"),
        ("sampling", isinstance(request.sampling, Sampling), "a Sampling"),
        ("salt", isinstance(request.salt, str | None), "a text or None"),
        ("presence_penalty", isinstance(request.presence_penalty, Real), "a number"),
        ("frequency_penalty", isinstance(request.frequency_penalty, Real), "a number"),
        ("echo", isinstance(request.echo, bool), "True or False"),
        ("bias", isinstance(request.bias, tuple) and all(
            isinstance(pair, tuple) and len(pair) == 2 and is_whole(pair[0])
            and isinstance(pair[1], Real) for pair in request.bias
        ), "a tuple of (token, number)"),
    )  # fmt: skip
    for name, holds, rule in rules:
        if not holds:
            raise UserError(f"{name} must be {rule}, got {getattr(request, name)!r:.60}; give one")


def _are_whole(values: object) -> bool:
    return isinstance(values, tuple) and all(map(is_whole, values))


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: a lone surrogate cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


@dataclass(frozen=True)
class Outcome:
    """How an answer ended. read_tokens, cached_tokens: of the prompt, those that were computed and
    those that needed not be; fewer than all where it was given up.

    seconds since the request came: begun (a slot was there), first (of the first token, None where
    there was none), ended. error: what went wrong where the reason is `error`.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    begun: float | None
    first: float | None
    ended: float
    read_tokens: int
    error: str = ""


@runtime_checkable
class Listener(Protocol):
    """Whoever waits for an answer. All three are called by the engine's thread and must not wait.

    An exception in one of them ends this answer with the reason `error`, and no other.
    """

    def prompt(self, scored: list[Scored]) -> None:
        """The prompt's tokens, where `echo` was asked; before the first new token."""

    def token(self, scored: Scored) -> bool:
        """A new token, an eos among them; True ends the answer here, with the reason `stop`."""

    def done(self, outcome: Outcome) -> None:
        """Nothing follows; called once, whatever happened."""


class Overloaded(Exception):
    """The engine takes no more for now. seconds: after which it may."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
