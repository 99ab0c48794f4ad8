"""Parse the body of a request into requests to the engine."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jaxkv.defaults import MAX_TOKENS
from jaxkv.errors import UserError
from jaxkv.sampling import TEMPERATURE, Sampling
from jaxkv.serve.engine.request import Request
from jaxkv.serve.http import body, fields, neutral
from jaxkv.serve.http.api_keys import Tenant
from jaxkv.serve.http.choices import Piece
from jaxkv.serve.http.faults import Fault, shown
from jaxkv.serve.http.formats import ResponseFormat
from jaxkv.serve.http.protocols import EngineProtocol, LanguageProtocol

COMPOSED = 4  # characters that a tokenizer may normalize into one, at most
PROBED = 16  # characters per token of max_len that are tokenized first
TOTAL = 2**20  # characters of all prompts of a request, or more if one prompt may have more
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ServerConfig:
    """The limits and settings of a server.

    max_body: bytes of a body.
    max_bodies: bodies that are still coming.
    max_in_flight: answers at a time.
    max_per_key: answers at a time for one API key; None for no limit.
    max_answers: answers to one request.
    max_batch: answers that need not wait.
    max_waiting_tokens: prompt tokens of the other answers to a request.
    max_unread: events that a client has not read yet.
    max_connections: open connections; None for as many as the limit of open files allows.
    header_seconds, read_seconds, write_seconds: limits for a client to send its header, to send its
      body, and to read on.
    comment_seconds: time between comments in a stream that has no new tokens.
    report_cached: report cached prompt tokens, which may reveal other users' prompts.
    host: the name or address that the server was told to listen on.
    allowed_origins: origins of web pages on other sites that may use the server, such as
      https://chat.example; `*` is all.
    metrics_prefix: prefix of the names of metrics.
    aliases: more names of the model.
    fingerprint: hash of the model and its settings.
    sampling: defaults for requests that set none.
    log_probes: log successful requests for /health and /metrics, too.
    """

    max_body: int = 8 * 2**20
    max_bodies: int = 256
    max_in_flight: int = 1024
    max_per_key: int | None = None
    max_answers: int = 1024
    max_batch: int = 1024
    max_waiting_tokens: int = 2**20
    max_unread: int = 4096
    max_connections: int | None = None
    header_seconds: float = 5.0
    read_seconds: float = 60.0
    write_seconds: float = 60.0
    comment_seconds: float = 5.0
    report_cached: bool = True
    host: str = "127.0.0.1"
    allowed_origins: tuple[str, ...] = ()
    metrics_prefix: str = "jaxkv"
    aliases: tuple[str, ...] = ()
    fingerprint: str = ""
    log_probes: bool = False
    sampling: Sampling = field(default_factory=lambda: Sampling(TEMPERATURE))


class Job(NamedTuple):
    """The engine's requests, in the order of their answers, and the format of these.

    echoes: the text with which each answer begins. offsets: characters of each prompt, from which
    OpenAI's text_offset counts. n: answers per prompt. scored: tokens are
    reported with log probabilities. usage: a stream ends with token counts.
    """

    requests: Sequence[Request]
    echoes: Sequence[str]
    offsets: Sequence[int]
    n: int
    stops: Sequence[str]
    scored: bool
    stream: bool
    usage: bool

    def opening(self, index: int) -> list[Piece]:
        """The pieces before the first token: an echo without scores."""
        echoes = self.echoes[index] and not self.scored
        return [Piece(index, "", (), prompt=True)] if echoes else []


def parse_job(
    raw: bytes,
    format: ResponseFormat,
    tenant: Tenant,
    engine: EngineProtocol,
    language: LanguageProtocol,
    config: ServerConfig,
) -> Job:
    """Parse a body. Raises Fault for anything that cannot be answered exactly as requested."""
    values = fields.read(format.kind, body.parse(raw))
    if values["model"] not in (language.name, *config.aliases):
        raise unknown_model(values["model"], language)
    biased = [token for token, _ in values["logit_bias"]]
    for name, ids in (("logit_bias", biased), ("stop_token_ids", values["stop_token_ids"])):
        if not 0 <= min(ids, default=0) <= max(ids, default=0) < engine.vocab:
            raise fields.wrong(name, f"of token ids from 0 to {engine.vocab - 1}", [*ids])
    count, n = 1 if "messages" in values else len(values["prompt"]), values["n"]
    max_answers = (
        config.max_answers
        if config.max_per_key is None
        else min(config.max_answers, config.max_per_key)
    )
    if count * n > max_answers:  # before tokenizing
        got = f"{count * n} (prompts: {count}, n: {n})"
        message = f"a request may ask for {max_answers} answers, got {got}"
        raise Fault(400, f"{message}; send several", param="n" if n > 1 else "prompt")
    try:
        prompts = _prompts(values, format, engine, language, config)
        shared = {"salt": tenant.salt(values["cache_salt"]), "owner": tenant.digest.hex()}
        requests = [
            request
            for _, ids in prompts
            for request in _requests(values, ids, shared, format, engine, language, config)
        ]
    except UserError as error:
        raise Fault(400, str(error)) from None
    echo = values.get("echo", False)
    return Job(
        requests=requests,
        echoes=[text if echo else "" for text, _ in prompts for _ in range(n)],
        offsets=[len(text) for text, _ in prompts for _ in range(n)],
        n=n,
        stops=values["stop"],
        scored=requests[0].logprobs is not None,
        stream=values["stream"],
        usage=bool(values["stream_options"]),
    )


def unknown_model(name: str, language: LanguageProtocol) -> Fault:
    message = f"no model {shown(name)} is served here; ask for {language.name!r}"
    return Fault(404, message, "model_not_found", "model")


def _prompts(
    values: dict[str, Any],
    format: ResponseFormat,
    engine: EngineProtocol,
    language: LanguageProtocol,
    config: ServerConfig,
) -> list[tuple[str, list[int]]]:
    """Text and ids of each prompt. Each is checked before the next one is tokenized."""
    if "messages" in values:
        variables = neutral.template_variables(
            values["chat_template_kwargs"], values["reasoning_effort"], language.variables
        )
        texts = [text for message in values["messages"] for text in message.values()]
        if variables:
            texts.append(json.dumps(variables))
        _check_length("".join(texts), "messages", engine, language)
        try:
            ids = language.render(
                values["messages"], variables, values["add_generation_prompt"] is not False,
                values["continue_final_message"],
            )  # fmt: skip
        except UserError as error:
            raise Fault(400, str(error), param="messages") from None
        return [("", ids)]
    size = sum(len(prompt) for prompt in values["prompt"] if isinstance(prompt, str))
    max_characters = (
        TOTAL if engine.max_len is None else max(TOTAL, _most_characters(engine, language))
    )
    if size > max_characters:
        message = (
            f"the prompts of a request may have {max_characters} characters together, got {size}"
        )
        raise Fault(400, f"{message}; send several requests", param="prompt")
    prompts: list[tuple[str, list[int]]] = []
    for prompt in values["prompt"]:
        prompts.append(_prompt(prompt, values, format, engine, language))
        _check_waiting([len(ids) for _, ids in prompts], values["n"], config)
    return prompts


def _prompt(
    prompt: str | list[int],
    values: dict[str, Any],
    format: ResponseFormat,
    engine: EngineProtocol,
    language: LanguageProtocol,
) -> tuple[str, list[int]]:
    """Text and ids of one prompt of a completion; the text of ids only if it is used."""
    if isinstance(prompt, str):
        _check_length(prompt, "prompt", engine, language)
        ids = language.encode(prompt)
        _max_new_tokens(values, len(ids), format, engine)
        return prompt, ids
    if any(min(ids) < 0 or max(ids) >= engine.vocab for ids in fields.pieces(prompt)):
        raise fields.wrong("prompt", f"of token ids from 0 to {engine.vocab - 1}", prompt)
    _max_new_tokens(values, len(prompt), format, engine)
    used = values["echo"] or values["logprobs"] is not None
    return "".join(language.pieces(prompt)) if used else "", prompt


def _check_waiting(sizes: Sequence[int], n: int, config: ServerConfig) -> None:
    """Raise Fault for prompts that could never be queued. sizes: tokens of each."""
    queued = [size for size in sizes for _ in range(n)][config.max_batch :]
    max_tokens = config.max_waiting_tokens
    if len(queued) > 1 and sum(queued) > max_tokens:
        message = (
            f"prompts beyond the first {config.max_batch} may have {max_tokens} tokens together"
        )
        message = f"{message}, got {sum(queued)} or more; send several requests"
        raise Fault(400, message, param="prompt")


def _most_characters(engine: EngineProtocol, language: LanguageProtocol) -> int:
    """The characters of a prompt beyond which it certainly has too many tokens."""
    return COMPOSED * engine.max_len * language.longest


def _check_length(
    text: str, param: str, engine: EngineProtocol, language: LanguageProtocol
) -> None:
    """Raise Fault for a text that is certainly too long, because tokenizing it takes seconds."""
    if engine.max_len is None:
        if len(text) > TOTAL:
            message = f"{param} may have {TOTAL} characters together, got {len(text)}"
            raise Fault(400, f"{message}; shorten it", "context_length_exceeded", param)
        return
    max_characters, head = _most_characters(engine, language), text[: PROBED * engine.max_len]
    if len(text) > max_characters:
        why = f"for which {max_characters} characters are too many, got {len(text)}"
    # Twice the tokens, because a token may extend over the cut.
    elif len(head) < len(text) and len(language.encode(head)) > 2 * engine.max_len:
        why = f"the first {len(head)} characters alone have more"
    else:
        return
    message = f"prompt and answer may have {engine.max_len} tokens together, {why}"
    raise Fault(400, f"{message}; shorten the prompt", "context_length_exceeded", param)


def _requests(
    values: dict[str, Any],
    ids: Sequence[int],
    shared: dict[str, str | None],
    format: ResponseFormat,
    engine: EngineProtocol,
    language: LanguageProtocol,
    config: ServerConfig,
) -> list[Request]:
    """One request for each of the n answers to a prompt. shared: the same fields of all requests.

    They differ in their seeds, which are consecutive: seed 5 with n=3 gives the first answers to
    the seeds 5, 6 and 7.
    """
    seed = values["seed"] if values["seed"] is not None else secrets.randbits(32)
    overrides = {name: values[name] for name in SAMPLING if values[name] is not None}
    logprobs = values["logprobs"]
    if format.kind == "chat":
        logprobs = (values["top_logprobs"] or 0) if logprobs else None
    max_new_tokens = _max_new_tokens(values, len(ids), format, engine)
    if values["min_tokens"] > max_new_tokens:
        raise fields.wrong(
            "min_tokens", f"at most the {max_new_tokens} new tokens", values["min_tokens"]
        )
    ends = () if values["ignore_eos"] else language.eos
    first = Request(
        tokens=tuple(ids),
        max_new_tokens=max_new_tokens,
        min_new_tokens=values["min_tokens"],
        sampling=replace(config.sampling, **overrides),
        seed=seed,
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        bias=values["logit_bias"],
        eos=(*ends, *values["stop_token_ids"]),
        logprobs=logprobs,
        echo=logprobs is not None and values.get("echo", False),
        **shared,
    )
    return [replace(first, seed=(seed + n) % 2**32) for n in range(values["n"])]


def _max_new_tokens(
    values: dict[str, Any], size: int, format: ResponseFormat, engine: EngineProtocol
) -> int:
    """The limit of new tokens; by default the route's, or less if max_len is reached before.

    Raises Fault for a prompt of `size` tokens, or an answer, that is too long.
    """
    room = math.inf if engine.max_len is None else engine.max_len - size
    name = "max_completion_tokens" if values.get("max_completion_tokens") else "max_tokens"
    param = "messages" if format.kind == "chat" else "prompt"
    requested = values[name]
    if requested == -1:  # as many as the server allows
        requested = int(min(max(room, 1), MAX_TOKENS))
    # Prompts are prefilled one after another, so a longer one would delay all others.
    if room == math.inf and size > MAX_TOKENS:
        message = f"a prompt may have {MAX_TOKENS} tokens on this server, got {size}; shorten it"
        raise Fault(400, message, "context_length_exceeded", param)
    if room < (1 if requested is None else requested):
        message = (
            f"prompt and answer may have {engine.max_len} tokens together, got {size} and "
            f"{'at least 1' if requested is None else requested}; shorten one of them"
        )
        raise Fault(400, message, "context_length_exceeded", param)
    if requested is None:
        return int(min(room, format.default_tokens))
    # A longer answer would keep its batch entry from other clients for hours.
    if room == math.inf and requested > MAX_TOKENS:
        message = f"{name} may be at most {MAX_TOKENS} on this server, got {requested}"
        raise Fault(400, f"{message}; continue the text in another request", param=name)
    return requested
