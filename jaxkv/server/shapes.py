"""The two shapes of an answer: a text, or a message in a chat; whole, or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.engine.request import Outcome
from jaxkv.server.choices import Spelled

Json = dict[str, Any]
LEAST = -9999.0  # a log probability in JSON, which has no infinity

Make = Callable[[int, str, Json | None, str | None], Json]


@dataclass(frozen=True)
class Shape:
    """How one route answers.

    kind: of its fields; prefix: of its ids; whole, chunk: what it calls its objects; room: new
    tokens where none are asked for. choice, delta: one answer, and more of one, from its index,
    text, log probabilities and finish_reason. opening: what comes before a text, if anything does.
    """

    kind: str
    prefix: str
    whole: str
    chunk: str
    room: int
    choice: Make
    delta: Make
    opening: Callable[[int], Json] | None
    logprobs: Callable[[Sequence[Spelled]], Json]


def _choice(index: int, logprobs: Json | None, reason: str | None, **content: Any) -> Json:
    return {"index": index} | content | {"logprobs": logprobs, "finish_reason": reason}


def _text(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return _choice(index, logprobs, reason, text=text)


def _message(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    message = {"role": "assistant", "content": text, "refusal": None}
    return _choice(index, logprobs, reason, message=message)


def _delta(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return _choice(index, logprobs, reason, delta={"content": text} if text else {})


def _role(index: int) -> Json:
    return _choice(index, None, None, delta={"role": "assistant", "content": ""})


def _columns(told: Sequence[Spelled]) -> Json:
    return {
        "tokens": [_spelled(one.token) for one in told],
        "token_logprobs": [_finite(one.logprob) for one in told],
        "top_logprobs": [_top(one) for one in told],
        "text_offset": [one.offset for one in told],
    }


def _top(told: Spelled) -> dict[str, float] | None:
    """The likeliest by their texts, and the token itself; of two with one text the likelier."""
    if told.logprob is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in [*told.top, (told.token, told.logprob)]:
        top.setdefault(_spelled(token), _finite(logprob))
    return top


def _rows(told: Sequence[Spelled]) -> Json:
    def row(token: bytes, logprob: float | None) -> Json:
        return {"token": _spelled(token), "logprob": _finite(logprob), "bytes": list(token)}

    content = [
        row(one.token, one.logprob) | {"top_logprobs": [row(*each) for each in one.top]}
        for one in told
    ]
    return {"content": content, "refusal": None}


def _spelled(token: bytes) -> str:
    """A token's text; half a character is written as its bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else logprob if logprob > LEAST else LEAST


COMPLETION = Shape(
    "completions", "cmpl-", "text_completion", "text_completion", 16, _text, _text, None, _columns
)
CHAT = Shape(
    "chat", "chatcmpl-", "chat.completion", "chat.completion.chunk", 4096, _message, _delta,
    _role, _rows,
)  # fmt: skip


def usage(outcomes: Sequence[Outcome], n: int, tell_cached: bool) -> Json:
    """Tokens of all answers; of the n answers to one prompt, its tokens count once."""
    prompts = outcomes[::n]
    read = sum(outcome.prompt_tokens for outcome in prompts)
    new = sum(outcome.new_tokens for outcome in outcomes)
    told: Json = {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
    if tell_cached:
        cached = sum(outcome.cached_tokens for outcome in prompts)
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return told
