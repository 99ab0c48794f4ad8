"""The state of a request inside the engine, and its parameters on the device."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxkv.contract import Policy
from jaxkv.defaults import GROWING_LEN
from jaxkv.errors import UserError, check_int
from jaxkv.sampling import Knobs, knobs_of_sequence
from jaxkv.serve.engine.prefill import PrefillState
from jaxkv.serve.engine.programs import SequenceParams
from jaxkv.serve.engine.request import Listener, Outcome, Request, ScoredToken
from jaxkv.serve.engine.step_output import MAX_LOGPROBS, StepOutput
from jaxkv.serve.engine.store import PrefixHit
from jaxkv.typing import Float32


@dataclass(eq=False)
class RequestHandle:
    """One submitted request.

    dispatched, generated: new tokens requested from the device, and delivered to the listener.
    cached, computed: prompt tokens. queue_seconds, first_token_seconds: since its arrival.
    """

    request: Request
    listener: Listener
    arrival: float
    cancelled: bool = False
    finished: bool = False
    dispatched: int = 0
    generated: int = 0
    cached: int = 0
    computed: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    prompt_scores: list[ScoredToken] = field(default_factory=list)

    def outcome(self, reason: str, error: str = "") -> Outcome:
        """The outcome of a request that ends now."""
        return Outcome(
            reason, len(self.request.tokens), self.cached, self.generated, self.queue_seconds,
            self.first_token_seconds, time.monotonic() - self.arrival, self.computed, error,
        )  # fmt: skip


class ActivePrefill(NamedTuple):
    """A prefill in progress; `state` has its first `position` tokens."""

    handle: RequestHandle
    state: PrefillState
    position: int
    hit: PrefixHit | None

    def next_size(self, chunk: int) -> int:
        """The tokens of its next chunk."""
        return min(chunk, len(self.handle.request.tokens) - self.position)


class InFlightStep(NamedTuple):
    """A step that the device has not returned yet; handles: (index into `output`, handle).

    prompt_start: the tokens belong to the prompt, from this position on; None for new tokens.
    """

    output: StepOutput
    handles: Sequence[tuple[int, RequestHandle]]
    prompt_start: int | None = None


def resolve_max_len(policies: Sequence[Policy], max_len: int | None) -> int | None:
    """The most tokens of a sequence; None for no limit, which only bounded caches allow."""
    if max_len is None and any(policy.grows for policy in policies):
        return GROWING_LEN
    if max_len is not None:
        check_int("max_len", max_len, maximum=2**31 - 1)
    return max_len


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


def padded_widths(chunk: int) -> tuple[int, ...]:
    """The widths to which a piece of a prompt is padded, so that few shapes are compiled."""
    return (*(width for width in (16, 64, 256, 1024) if width < chunk), chunk)


def policy_seed(seed: int, salt: str | None) -> np.uint32:
    """The seed of the policies' random draws, equal for all requests of one salt."""
    data = f"{seed}:".encode() + (b"" if salt is None else b"salt:" + salt.encode())
    return np.frombuffer(hashlib.sha256(data).digest()[:4], "<u4")[0]


def sequence_params(request: Request, vocab: int) -> SequenceParams:
    """The parameters of a request for its batch entry."""
    seen = np.zeros((1, vocab), bool)
    seen[0, list(request.tokens)] = True
    return SequenceParams(
        position=np.array([len(request.tokens)], np.uint32),
        seed=np.array([request.seed], np.uint32),
        knobs=Knobs(*(np.asarray(knob)[None] for knob in knobs_of_sequence(request.sampling))),
        seen=seen,
        penalties=np.array([[request.presence_penalty, request.frequency_penalty]], np.float32),
        bias=bias_row(request, vocab, may_end=request.min_new_tokens == 0),
    )


def bias_row(request: Request, vocab: int, may_end: bool) -> Float32[np.ndarray, "1 V"]:
    """What is added to the logits. may_end: whether the next token may be an eos."""
    bias = np.zeros((1, vocab), np.float32)
    for token, value in request.bias:
        bias[0, token] += value
    if not may_end:
        bias[0, [token for token in request.eos if 0 <= token < vocab]] = -np.inf
    return bias


def scored_token(request: Request, output: StepOutput, index: int) -> ScoredToken:
    """One token of a step's output, with the log probabilities that the request wants."""
    token = int(output.token[index])
    if request.logprobs is None:
        return ScoredToken(token)
    top = zip(output.top[index].tolist(), output.top_logprobs[index].tolist(), strict=True)
    return ScoredToken(token, float(output.logprob[index]), tuple(top)[: request.logprobs])
