"""A request on its way through the engine, and what it looks like to the device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxkv.engine.programs import TOP, Asked, Lane, Told
from jaxkv.engine.request import Listener, Request, Scored
from jaxkv.engine.store import Hit
from jaxkv.errors import UserError
from jaxkv.sampling import Knobs, knobs_of_sequence


@dataclass(eq=False)
class Ticket:
    """One request on its way. begun, first: seconds since it came."""

    request: Request
    listener: Listener
    came: float
    cancelled: bool = False
    over: bool = False
    slot: int | None = None
    sent: int = 0  # new tokens that the device was asked for
    new: int = 0  # those that were told
    cached: int = 0
    read: int = 0  # tokens of its prompt
    begun: float | None = None
    first: float | None = None
    scored: list[Scored] = field(default_factory=list)


class Reading(NamedTuple):
    """The prompt that is being read: so many of its tokens are in the lane."""

    ticket: Ticket
    lane: Lane
    at: int
    hit: Hit | None


class Flight(NamedTuple):
    """What the device was asked for and has not been told yet: a row of `told` for each ticket.

    prompt: the tokens are those of a prompt, from here on.
    """

    told: Told
    tickets: Sequence[tuple[int, Ticket]]
    prompt: int | None = None


def check(request: Request, room: int, vocab: int) -> None:
    """Raise UserError for what no slot of so many tokens holds, and ids beyond the vocabulary."""
    size, new = len(request.tokens), request.max_new_tokens
    if not 0 <= min(request.tokens) <= max(request.tokens) < vocab:
        raise UserError(
            f"token ids must be from 0 to {vocab - 1}, got {min(request.tokens)} to "
            f"{max(request.tokens)}; give the model's own"
        )
    if size + new > room:
        raise UserError(
            f"a row holds {room} tokens, and {size} of prompt and {new} new ones were "
            "asked for; shorten one of them"
        )
    top = min(TOP, vocab)
    if request.logprobs is not None and not 0 <= request.logprobs <= top:
        raise UserError(f"logprobs must be from 0 to {top}, got {request.logprobs}; ask for fewer")
    odd = next((token for token, _ in request.bias if not 0 <= token < vocab), None)
    if odd is not None:
        raise UserError(
            f"biased tokens must be from 0 to {vocab - 1}, got {odd}; give the model's own"
        )


def widths(chunk: int) -> tuple[int, ...]:
    """What a piece of prompt is padded to: few lengths, so that few are compiled."""
    return (*(width for width in (16, 64, 256, 1024) if width < chunk), chunk)


def salt_of(seed: int, salt: str | None) -> np.uint32:
    """What policies draw by, for all requests of a salt."""
    told = f"{seed}:".encode() + (b"" if salt is None else b"salt:" + salt.encode())
    return np.frombuffer(hashlib.sha256(told).digest()[:4], "<u4")[0]


def asked_of(request: Request, vocab: int) -> Asked:
    """What a request brings to its slot."""
    seen = np.zeros((1, vocab), bool)
    seen[0, list(request.tokens)] = True
    bias = np.zeros((1, vocab), np.float32)
    for token, value in request.bias:
        bias[0, token] += value
    return Asked(
        position=np.array([len(request.tokens)], np.uint32),
        seed=np.array([request.seed], np.uint32),
        knobs=Knobs(*(np.asarray(knob)[None] for knob in knobs_of_sequence(request.sampling))),
        seen=seen,
        penalties=np.array([[request.presence_penalty, request.frequency_penalty]], np.float32),
        bias=bias,
    )


def scored_of(request: Request, told: Told, row: int) -> Scored:
    """One token as it was asked for."""
    token = int(told.token[row])
    if request.logprobs is None:
        return Scored(token)
    each = zip(told.top[row].tolist(), told.top_logprobs[row].tolist(), strict=True)
    return Scored(token, float(told.logprob[row]), tuple(each)[: request.logprobs])
