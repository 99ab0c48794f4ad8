"""The two response formats: a text completion and a chat message, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.serve.engine.request import Outcome
from jaxkv.serve.http.choices import TokenText

Json = dict[str, Any]
LEAST = -9999.0  # stands for -inf, which JSON lacks

Make = Callable[[int, str, Json | None, str | None], Json]


@dataclass(frozen=True)
class ResponseFormat:
    """The response format of one route.

    kind: the route, which decides the fields of requests.
    prefix: the beginning of response ids.
    answer, chunk: names of the response object and of a streamed part of it.
    default_tokens: limit of new tokens if a request sets none.
    choice, delta: make one answer, and a part of one, from its index, text, log probabilities and
      finish_reason.
    opening: makes the part before the text, or None.
    logprobs: makes the log probabilities of an answer's tokens.
    """

    kind: str
    prefix: str
    answer: str
    chunk: str
    default_tokens: int
    choice: Make
    delta: Make
    opening: Callable[[int], Json] | None
    logprobs: Callable[[Sequence[TokenText]], Json]


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
    return None if logprob is None else logprob if logprob > LEAST else LEAST


COMPLETION = ResponseFormat(
    "completions", "cmpl-", "text_completion", "text_completion", 16, _text, _text, None, _columns
)
CHAT = ResponseFormat(
    "chat", "chatcmpl-", "chat.completion", "chat.completion.chunk", 4096, _message, _delta,
    _role, _entries,
)  # fmt: skip


def usage(outcomes: Sequence[Outcome], n: int, report_cached: bool) -> Json:
    """Token counts of all answers; the n answers to a prompt count its tokens once."""
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
    return counts
