"""From a body to what the engine is asked for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxkv.engine.request import Request
from jaxkv.errors import UserError
from jaxkv.sampling import Sampling
from jaxkv.server import body, fields
from jaxkv.server.choices import Piece
from jaxkv.server.faults import Fault, shown
from jaxkv.server.keys import Tenant
from jaxkv.server.language import Engine, Language
from jaxkv.server.shapes import Shape

COMPOSED = 4  # characters of a text that a tokenizer may make one of, at most
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Terms:
    """What one request may take.

    body: its bytes. in_hand: answers at a time, of all; each: of one key, None for no limit.
    answers: to one request; slots: of them that need not wait; tokens: of the prompts of others,
    where they are several. unread: events of an answer that its client has not read yet.
    read_seconds: for a body to come; write_seconds: for a client to read on. tell_cached: say how
    much of a prompt was in the cache, which others put there. fingerprint: of what answers.
    """

    body: int = 8 * 2**20
    in_hand: int = 1024
    each: int | None = None
    answers: int = 1024
    slots: int = 1024
    tokens: int = 2**20
    unread: int = 4096
    read_seconds: float = 60.0
    write_seconds: float = 60.0
    tell_cached: bool = True
    fingerprint: str = ""


class Work(NamedTuple):
    """The engine's requests, in the order of their answers, and how these are told.

    echoes: what each answer begins with. n: answers to a prompt. scored: tokens are told with
    their log probabilities. usage: it ends a stream.
    """

    requests: Sequence[Request]
    echoes: Sequence[str]
    n: int
    stops: Sequence[str]
    scored: bool
    stream: bool
    usage: bool

    def opening(self, index: int) -> list[Piece]:
        """What an answer tells before the engine does: an echo that is not scored."""
        echoes = self.echoes[index] and not self.scored
        return [Piece(index, "", (), prompt=True)] if echoes else []


def read(
    raw: bytes, shape: Shape, tenant: Tenant, engine: Engine, language: Language, terms: Terms
) -> Work:
    """The work in a body. Raises Fault for anything that cannot be done just as it was asked."""
    values = fields.read(shape.kind, body.parse(raw))
    if values["model"] != language.name:
        raise unknown_model(values["model"], language)
    biased = [token for token, _ in values["logit_bias"]]
    if max(biased, default=0) >= engine.vocab:
        raise fields.wrong("logit_bias", f"of token ids from 0 to {engine.vocab - 1}", max(biased))
    count, n = 1 if "messages" in values else len(values["prompt"]), values["n"]
    most = terms.answers if terms.each is None else min(terms.answers, terms.each)
    if count * n > most:  # before anything of them becomes tokens
        message = f"a request may ask for {most} answers, got {count} prompts, n={n}"
        raise Fault(400, f"{message}; send several", param="n" if n > 1 else "prompt")
    try:
        prompts = _prompts(values, shape, engine, language)
        salt = tenant.salt(values["cache_salt"])
        requests = [
            request
            for _, ids in prompts
            for request in _requests(values, ids, salt, shape, engine, language)
        ]
    except UserError as error:
        raise Fault(400, str(error)) from None
    others = [len(request.tokens) for request in requests[terms.slots :]]
    size = sum(others)
    if len(others) > 1 and size > terms.tokens:  # it would be told to come again each time it does
        message = f"prompts beyond the first {terms.slots} may have {terms.tokens} tokens together"
        raise Fault(400, f"{message}, got {size}; send several requests", param="prompt")
    echo = values.get("echo", False)
    return Work(
        requests=requests,
        echoes=[text if echo else "" for text, _ in prompts for _ in range(n)],
        n=n,
        stops=values["stop"],
        scored=requests[0].logprobs is not None,
        stream=values["stream"],
        usage=bool(values["stream_options"]),
    )


def unknown_model(name: str, language: Language) -> Fault:
    message = f"no model {shown(name)} is served here; ask for {language.name!r}"
    return Fault(404, message, "model_not_found", "model")


def _prompts(
    values: dict[str, Any], shape: Shape, engine: Engine, language: Language
) -> list[tuple[str, list[int]]]:
    """Text and ids of each prompt."""
    if "messages" in values:
        said = sum(len(message["content"]) for message in values["messages"])
        _check_length(said, "messages", engine, language)
        return [("", language.render(values["messages"]))]
    prompts = []
    for prompt in values["prompt"]:
        if isinstance(prompt, str):
            _check_length(len(prompt), "prompt", engine, language)
            prompts.append((prompt, language.encode(prompt)))
        elif min(prompt) < 0 or max(prompt) >= engine.vocab:
            raise fields.wrong("prompt", f"of token ids from 0 to {engine.vocab - 1}", prompt)
        else:
            _room(values, len(prompt), shape, engine)
            echoed = "".join(language.pieces(prompt)) if values["echo"] else ""
            prompts.append((echoed, prompt))
    return prompts


def _check_length(size: int, param: str, engine: Engine, language: Language) -> None:
    """Raise Fault for a text that is surely too long: it takes seconds to make tokens of it."""
    most = COMPOSED * engine.room * language.longest
    if size > most:
        message = (
            f"prompt and answer may have {engine.room} tokens together, for which {most} characters"
            f" are too many, got {size}; shorten the prompt"
        )
        raise Fault(400, message, "context_length_exceeded", param)


def _requests(
    values: dict[str, Any],
    ids: Sequence[int],
    salt: str | None,
    shape: Shape,
    engine: Engine,
    language: Language,
) -> list[Request]:
    """One for each of the n answers to a prompt; they differ in their seeds alone, which follow one
    another: the answers to seed 5 are the first ones to 5, 6, 7."""
    seed = values["seed"] if values["seed"] is not None else secrets.randbits(32)
    logprobs = values["logprobs"]
    if shape.kind == "chat":
        logprobs = (values["top_logprobs"] or 0) if logprobs else None
    first = Request(
        tokens=tuple(ids),
        max_new_tokens=_room(values, len(ids), shape, engine),
        sampling=Sampling(**{name: values[name] for name in SAMPLING}),
        seed=seed,
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        bias=values["logit_bias"],
        eos=() if values["ignore_eos"] else language.eos,
        salt=salt,
        logprobs=logprobs,
        echo=logprobs is not None and values.get("echo", False),
    )
    return [replace(first, seed=(seed + n) % 2**32) for n in range(values["n"])]


def _room(values: dict[str, Any], size: int, shape: Shape, engine: Engine) -> int:
    """How many new tokens to make; left open, what the route gives and the slot has room for."""
    left = engine.room - size
    name = "max_completion_tokens" if values.get("max_completion_tokens") else "max_tokens"
    asked = values[name]
    if left < (1 if asked is None else asked):
        message = (
            f"prompt and answer may have {engine.room} tokens together, got {size} and "
            f"{'at least 1' if asked is None else asked}; shorten one of them"
        )
        param = "messages" if shape.kind == "chat" else "prompt"
        raise Fault(400, message, "context_length_exceeded", param)
    return min(left, shape.room) if asked is None else asked
