"""Parse the body of a request into requests to the engine."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxkv.defaults import MAX_TOKENS
from jaxkv.errors import UserError
from jaxkv.serve.engine.request import MatcherProtocol, Request
from jaxkv.serve.http.access import Tenant
from jaxkv.serve.http.answer_form import (
    Values,
    answer_form,
    grammar_field,
    matcher_of,
    parser_of,
    tool_form_of,
)
from jaxkv.serve.http.body import parse
from jaxkv.serve.http.checks import check_known, invalid, is_ids
from jaxkv.serve.http.errors import APIError, shown
from jaxkv.serve.http.fields import ignored, template_variables, validate
from jaxkv.serve.http.protocols import EngineProtocol, LanguageProtocol
from jaxkv.serve.http.response_template import TemplateParser
from jaxkv.serve.http.responses import CHAT, Delta, ResponseFormat
from jaxkv.serve.http.responses_api import MessagePlace, chat_body, settings_of
from jaxkv.serve.http.server import ServerConfig
from jaxkv.serve.http.tools import AnswerParser

COMPOSED = 4  # characters that a tokenizer may normalize into one, at most
MAX_SCORES = 2**18  # written in less than half a second
TOTAL = 2**20  # characters of all prompts of a request, or more if one prompt may have more
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class ServedModel:
    """An engine, the tokenizer and chat template of its model, and the settings of the server."""

    engine: EngineProtocol
    language: LanguageProtocol
    config: ServerConfig

    @property
    def names(self) -> tuple[str, ...]:
        return (self.language.name, *self.config.aliases)

    @property
    def max_characters(self) -> int:
        """The characters of all prompts of a request, more if one prompt may have more."""
        return max(TOTAL, COMPOSED * (self.engine.max_len or 0) * self.language.max_token_bytes)

    def unknown(self, name: str) -> APIError:
        """The error for another name than one of `names`."""
        message = f"no model {shown(name)} is served here; ask for {self.language.name!r}"
        return APIError(404, message, "model_not_found", "model")


class CompletionRequest(NamedTuple):
    """The engine's requests, in the order of their answers, and the format of these."""

    requests: Sequence[Request]
    echoes: Sequence[str]  # the text with which each answer begins
    offsets: Sequence[int]  # characters of each prompt, from which OpenAI's text_offset counts
    n: int  # answers per prompt
    stops: Sequence[str]  # strings that end an answer
    scored: bool  # tokens are reported with log probabilities
    stream: bool  # answers are sent as they come
    usage: bool  # a stream ends with token counts
    grammar: str | None = None  # the field that an answer must obey
    # Divides an answer; None for a plain text.
    parser: Callable[[], AnswerParser | TemplateParser] | None = None
    marks: Collection[str] = ()  # special tokens that the parser reads
    settings: Mapping[str, Any] = MappingProxyType({})  # that a response repeats

    def opening(self, index: int) -> list[Delta]:
        """What comes before the first token: an echo without scores."""
        echoes = self.echoes[index] and not self.scored
        return [Delta(index, "", (), prompt=True)] if echoes else []


def parse_request(
    raw: bytes, format: ResponseFormat, tenant: Tenant, model: ServedModel
) -> CompletionRequest:
    """Parse a body. Raises APIError for anything that cannot be answered exactly as requested."""
    return _request_of(parse(raw), format, tenant, model)


def parse_prompts(raw: bytes, format: ResponseFormat, tenant: Tenant, model: ServedModel) -> Any:
    """The token ids of each prompt of a request, or of its only one, as vLLM's routes have them.

    Routers ask for them, to send prompts with equal beginnings to one server.
    """
    request = parse_request(raw, format, tenant, model)
    prompts = [{"token_ids": list(entry.tokens)} for entry in request.requests[:: request.n]]
    return prompts[0] if format.is_chat else prompts


def parse_tokens(raw: bytes, format: ResponseFormat, tenant: Tenant, model: ServedModel) -> Values:
    """The token ids of a prompt or of messages, as vLLM's route has them.

    A prompt may be longer than those that are answered, so that clients can count and shorten it.
    """
    body = parse(raw)
    if body.get("messages") is not None:
        format = CHAT
        if body.get("prompt") is not None:
            message = "prompt and messages exclude each other; give one"
            raise APIError(400, message, param="messages")
    ignored(False)("return_token_strs", body.pop("return_token_strs", None) or False)
    values = validate(format.kind, body)
    if values["model"] not in model.names:
        raise model.unknown(values["model"])
    prompts = values["prompt"] if not format.is_chat else [""]
    if values["n"] > 1:
        raise invalid("n", "1, as no answer is given", values["n"])
    if len(prompts) > 1:
        raise invalid("prompt", "one text, or a list of token ids", body["prompt"])
    if format.is_chat:
        tool_form_of(values, model.language)  # its rules hold here too
        ((_, tokens),) = _chat(values, model)
    else:
        _check_length(len(prompts[0]) if isinstance(prompts[0], str) else 0, "prompt", model)
        tokens = _ids(prompts[0], model)
    return {"count": len(tokens), "max_model_len": model.engine.max_len, "tokens": tokens}


def parse_text(raw: bytes, format: ResponseFormat, tenant: Tenant, model: ServedModel) -> Values:
    """The text of token ids, special ones written out, as vLLM's route has it."""
    body = parse(raw)
    check_known(body, ("model", "tokens"))
    if body.get("model") is not None and body["model"] not in model.names:
        raise model.unknown(body["model"])
    tokens = body.get("tokens")
    if type(tokens) is not list or (tokens and not is_ids(tokens)):
        raise invalid("tokens", "a list of token ids", tokens)
    _check_ids("tokens", tokens, model)
    text = b"".join(map(model.language.token_bytes, tokens)).decode("utf-8", "replace")
    return {"prompt": text}


def _request_of(
    body: Values, format: ResponseFormat, tenant: Tenant, model: ServedModel
) -> CompletionRequest:
    if format.kind != "responses":
        return _request(validate(format.kind, body), {}, format, tenant, model)
    chat, places = chat_body(body)
    try:
        return _request(validate("chat", chat), settings_of(body), format, tenant, model)
    except APIError as error:
        raise renamed(error, places) from None


def _request(
    values: Values, settings: Values, format: ResponseFormat, tenant: Tenant, model: ServedModel
) -> CompletionRequest:
    if values["model"] not in model.names:
        raise model.unknown(values["model"])
    _check_ids("logit_bias", [token for token, _ in values["logit_bias"]], model)
    _check_ids("stop_token_ids", values["stop_token_ids"], model)
    _check_answers(values, model.config)
    calls = tool_form_of(values, model.language)
    try:
        prompts = _chat(values, model) if format.is_chat else _texts(values, model, format)
        form = answer_form(values, calls, prompts, model.language, format)
        matcher = matcher_of(values, form, model.language)
        requests = [
            request
            for _, ids in prompts
            for request in _requests(values, ids, tenant, model, format, matcher)
        ]
    except UserError as error:
        param = "messages" if format.is_chat else "prompt"
        raise APIError(400, str(error), param=param) from None
    n, sampling = values["n"], requests[0].sampling
    applied = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    return CompletionRequest(
        requests=requests,
        settings=settings and settings | applied,
        echoes=[text if values["echo"] else "" for text, _ in prompts for _ in range(n)],
        offsets=[len(text) for text, _ in prompts for _ in range(n)],
        n=n,
        stops=values["stop"],
        scored=requests[0].logprobs is not None,
        stream=values["stream"],
        usage=bool(values["stream_options"]),
        grammar=grammar_field(values, form),
        **parser_of(form, values, prompts, model.language, format),
    )


# How the Responses API names the fields of a chat.
RESPONSE_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format", "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice", "tool_choice.function": "tool_choice",
    ".tool_call_id": ".call_id", "].function": "]", "instructions.content": "instructions",
    "messages": "input",
}  # fmt: skip


MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?")
QUOTED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")  # values of the request in errors


def renamed(error: APIError, places: Sequence[MessagePlace]) -> APIError:
    """The error of a chat with the names of the Responses API. places: of its messages."""

    def name(match: re.Match[str]) -> str:
        place = places[int(match[1])] if int(match[1]) < len(places) else None
        if place is None:
            return match[0]
        return place.name if match[2] is None else place.calls[int(match[2])]

    def rename(text: str) -> str:
        text = MESSAGE.sub(name, text)
        for old, new in RESPONSE_NAMES.items():
            text = text.replace(old, new)
        return text

    rule, got, value = str(error).partition(", got ")
    parts = QUOTED.split(rule)  # every second one is quoted
    parts[::2] = map(rename, parts[::2])
    error.param = rename(error.param or "") or None
    error.args = ("".join(parts) + got + value,)
    return error


def _check_ids(name: str, ids: Sequence[int], model: ServedModel) -> None:
    """Raise APIError for ids that are not of the vocabulary."""
    vocab = model.engine.vocab
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        raise invalid(name, f"token ids from 0 to {vocab - 1}", [*ids])


def _check_answers(values: Values, config: ServerConfig) -> None:
    """Raise APIError for more answers than there may be at a time, before any tokenizing."""
    prompts, n = len(values.get("prompt", [""])), values["n"]
    max_answers = min(config.max_in_flight, config.max_per_key or config.max_in_flight)
    if prompts * n > max_answers:
        got = f"{prompts * n} (prompts: {prompts}, n: {n})"
        message = f"a request may ask for {max_answers} answers, got {got}; send several"
        raise APIError(400, message, param="n" if n > 1 else "prompt")


def _chat(values: Values, model: ServedModel) -> list[tuple[str, list[int]]]:
    """No text, and the ids of the conversation."""
    messages = values["messages"]
    variables = template_variables(
        values["chat_template_kwargs"], values["reasoning_effort"], model.language.variables
    )
    if tools := values["tool_choice"].among(values["tools"]):
        variables["tools"] = tools
    texts = [text for message in messages for text in message.values() if isinstance(text, str)]
    calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
    texts += [json.dumps(value) for value in (*calls, variables, values["tools"]) if value]
    _check_length(sum(map(len, texts)), "messages", model)
    begins_answer = values["add_generation_prompt"] is not False
    try:
        ids = model.language.render(
            messages, variables, begins_answer, values["continue_final_message"]
        )
    except UserError as error:
        raise APIError(400, str(error), param="messages") from None
    return [("", ids)]


def _texts(
    values: Values, model: ServedModel, format: ResponseFormat
) -> list[tuple[str, list[int]]]:
    """Text and ids of each prompt. Each is checked before the next one is tokenized."""
    size = sum(len(prompt) for prompt in values["prompt"] if isinstance(prompt, str))
    _check_length(size, "prompt", model)
    prompts: list[tuple[str, list[int]]] = []
    for prompt in values["prompt"]:
        prompts.append(_prompt(prompt, values, model, format))
        sizes = [len(ids) for _, ids in prompts]
        _check_waiting(sizes, values["n"], model.config)
        _check_scores(values, sum(sizes) * values["n"])
    return prompts


def _check_scores(values: Values, tokens: int) -> None:
    """Raise APIError for so many scores of echoed prompts that writing them delays others.

    tokens: of all echoes.
    """
    scores = tokens * (1 + (values["logprobs"] or 0))
    if values["echo"] and values["logprobs"] is not None and scores > MAX_SCORES:
        message = f"echo with logprobs may give {MAX_SCORES} log probabilities of prompts, got "
        message += f"{scores}; send several requests, or a smaller logprobs"
        raise APIError(400, message, param="logprobs")


def _prompt(
    prompt: str | list[int], values: Values, model: ServedModel, format: ResponseFormat
) -> tuple[str, list[int]]:
    """Text and ids of one prompt of a completion; the text of ids only if it is used."""
    ids = _ids(prompt, model)
    _max_new_tokens(values, len(ids), format, model)
    if isinstance(prompt, str):
        return prompt, ids
    used = values["echo"] or values["logprobs"] is not None
    return "".join(model.language.pieces(ids)) if used else "", ids


def _ids(prompt: str | list[int], model: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        return model.language.encode(prompt)
    _check_ids("prompt", prompt, model)
    return prompt


def _check_waiting(sizes: Sequence[int], n: int, config: ServerConfig) -> None:
    """Raise APIError for prompts that could never be queued. sizes: tokens of each."""
    queued = [size for size in sizes for _ in range(n)][config.max_batch :]
    max_tokens = config.max_waiting_tokens
    if len(queued) > 1 and sum(queued) > max_tokens:
        message = f"prompts beyond the first {config.max_batch} may have {max_tokens} tokens"
        message = f"{message} together, got {sum(queued)} or more; send several requests"
        raise APIError(400, message, param="prompt")


def _check_length(size: int, param: str, model: ServedModel) -> None:
    """Raise APIError for too many characters: tokenizing them would take seconds."""
    if size > model.max_characters:
        message = f"{param} may have {model.max_characters} characters together, got {size}"
        raise APIError(400, f"{message}; shorten it, or send several requests", TOO_LONG, param)


def _requests(
    values: Values,
    ids: Sequence[int],
    tenant: Tenant,
    model: ServedModel,
    format: ResponseFormat,
    matcher: MatcherProtocol | None,
) -> list[Request]:
    """One request for each of the n answers to a prompt.

    They differ in their seeds, which are consecutive: seed 5 with n=3 gives the first answers to
    the seeds 5, 6 and 7.
    """
    seed = values["seed"] if values["seed"] is not None else secrets.randbits(32)
    overrides = {name: values[name] for name in SAMPLING if values[name] is not None}
    logprobs = values["logprobs"]
    if format.is_chat:
        logprobs = (values["top_logprobs"] or 0) if logprobs else None
    max_new_tokens = _max_new_tokens(values, len(ids), format, model)
    if values["min_tokens"] > max_new_tokens:
        rule = f"at most the {max_new_tokens} new tokens"
        raise invalid("min_tokens", rule, values["min_tokens"])
    ends = () if values["ignore_eos"] else model.language.eos
    first = Request(
        tokens=tuple(ids),
        max_new_tokens=max_new_tokens,
        min_new_tokens=values["min_tokens"],
        sampling=replace(model.config.sampling, **overrides),
        seed=seed,
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        bias=values["logit_bias"],
        eos=(*ends, *values["stop_token_ids"]),
        salt=tenant.salt(values["cache_salt"]),
        owner=tenant.digest.hex(),
        logprobs=logprobs,
        echo=logprobs is not None and bool(values["echo"]),
    )
    return [
        replace(first, seed=(seed + n) % 2**32, matcher=matcher and matcher.copy())
        for n in range(values["n"])
    ]


def _max_new_tokens(values: Values, size: int, format: ResponseFormat, model: ServedModel) -> int:
    """The limit of new tokens; by default the route's, or less if max_len is reached before.

    Raises APIError for a prompt of `size` tokens, or an answer, that is too long.
    """
    max_len = model.engine.max_len
    room = math.inf if max_len is None else max_len - size
    name = "max_completion_tokens" if values.get("max_completion_tokens") else "max_tokens"
    if values["max_tokens"] not in (None, values[name]):
        message = f"max_tokens must equal max_completion_tokens, got {values['max_tokens']} and "
        raise APIError(400, message + f"{values[name]}; leave one out", param="max_tokens")
    param = "messages" if format.is_chat else "prompt"
    requested = values[name]
    if requested == -1:  # as many as the server allows
        requested = int(min(max(room, 1), MAX_TOKENS))
    # Prompts are prefilled one after another, so a longer one would delay all others.
    if room == math.inf and size > MAX_TOKENS:
        message = f"a prompt may have {MAX_TOKENS} tokens on this server, got {size}; shorten it"
        raise APIError(400, message, TOO_LONG, param)
    if room < (1 if requested is None else requested):
        message = f"prompt and answer may have {max_len} tokens together, got {size} and "
        message += f"{'at least 1' if requested is None else requested}; shorten one of them"
        raise APIError(400, message, TOO_LONG, param)
    if requested is None:
        return int(min(room, format.default_tokens))
    # A longer answer would keep its batch entry from other clients for hours.
    if room == math.inf and requested > MAX_TOKENS:
        message = f"{name} may be at most {MAX_TOKENS} on this server, got {requested}"
        raise APIError(400, f"{message}; continue the text in another request", param=name)
    return requested
