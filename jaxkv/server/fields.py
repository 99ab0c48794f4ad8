"""The fields of a request: a table with the type, range and default of each.

Unknown fields and unsupported values are refused, because ignoring them would change the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxkv.engine.request import is_unicode
from jaxkv.server.faults import Fault, shown

WHOLE = 2**31 - 1
LIKELIEST = 20  # log probabilities beside each token
STOPS, BIASES = 4, 300
STOP, TEXT = 200, 1000  # characters

Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Field:
    """check: returns the parsed value or raises Fault. default: for absent and null."""

    check: Check
    default: Any = None
    required: bool = False


def wrong(name: str, rule: str, value: object) -> Fault:
    return Fault(400, f"{name} must be {rule}, got {shown(value)}; correct it", param=name)


def whole(least: int, most: int) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise wrong(name, f"a whole number from {least} to {most}", value)
        return value

    return check


def number(least: float, most: float, above: bool = False) -> Check:
    """above: `least` itself is not allowed."""
    span = f"above {least:g} and at most {most:g}" if above else f"from {least:g} to {most:g}"

    def check(name: str, value: Any) -> float:
        holds = type(value) in (int, float) and least <= value <= most
        if not holds or (above and value == least):
            raise wrong(name, f"a number {span}", value)
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise wrong(name, "true or false", value)
    return value


def text(name: str, value: Any, most: int = TEXT) -> str:
    if type(value) is not str or not 0 < len(value) <= most:
        raise wrong(name, f"a text of 1 to {most} characters", value)
    return value


def salt(name: str, value: Any) -> str:
    """A text that can be hashed: valid Unicode."""
    return valid_unicode(name, text(name, value))


def valid_unicode(name: str, value: str) -> str:
    """A text without lone surrogates."""
    if not is_unicode(value):
        raise wrong(name, "valid Unicode without lone surrogates", value)
    return value


def only(value: Any) -> Check:
    """A known field of which only one value is supported."""

    def check(name: str, given: Any) -> Any:
        if type(given) is not type(value) or given != value:
            raise wrong(name, f"{shown(value)}, the only value supported here", given)
        return value

    return check


def stops(name: str, value: Any) -> tuple[str, ...]:
    several = [value] if type(value) is str else value
    if type(several) is not list or len(several) > STOPS:
        raise wrong(name, f"a text or at most {STOPS} of them", value)
    return tuple(text(name, stop, STOP) for stop in several)


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    rule = f"an object of at most {BIASES} token ids, each with a number from -100 to 100"
    if type(value) is not dict or len(value) > BIASES:
        raise wrong(name, rule, value)
    size = number(-100.0, 100.0)
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= len(str(WHOLE))):
            raise wrong(name, rule, value)
    return tuple(sorted((int(token), size(name, bias)) for token, bias in value.items()))


def stream_options(name: str, value: Any) -> bool:
    """Whether to send the usage."""
    if type(value) is not dict or value.keys() - {"include_usage"}:
        raise wrong(name, 'an object with nothing but "include_usage"', value)
    return flag(f"{name}.include_usage", value.get("include_usage", False))


def prompt(name: str, value: Any) -> list[str | list[int]]:
    """A list of texts or of lists of ids, also for one prompt."""
    rule = "a text, a list of token ids, or a list of either"
    several = value if type(value) is list and not _is_ids(value) else [value]
    if not several or not (
        all(type(one) is str for one in several)
        or all(type(one) is list and _is_ids(one) for one in several)
    ):
        raise wrong(name, rule, value)
    return [valid_unicode(name, one) if type(one) is str else one for one in several]


def _is_ids(value: list[Any]) -> bool:
    return set(map(type, value)) == {int}


MESSAGE = {"role", "content"}
ROLES = {role: role for role in ("system", "user", "assistant")} | {"developer": "system"}


def messages(name: str, value: Any) -> list[dict[str, str]]:
    """Role and content of each message; parts of a content are joined."""
    if type(value) is not list or not value:
        raise wrong(name, "a list of at least one message", value)
    return [_message(f"{name}[{at}]", one) for at, one in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, str]:
    # A client may send an answer's message back; its other fields are null.
    extra = type(value) is dict and any(value[key] is not None for key in value.keys() - MESSAGE)
    if type(value) is not dict or extra or not value.keys() >= MESSAGE:
        raise wrong(name, 'an object with "role" and "content" and nothing else', value)
    role, content = value["role"], value["content"]
    if type(role) is not str or role not in ROLES:
        raise wrong(f"{name}.role", f"one of {', '.join(ROLES)}", role)
    parts = [{"type": "text", "text": content}] if type(content) is str else content
    if type(parts) is not list or not all(map(_is_text_part, parts)):
        raise wrong(f"{name}.content", "a text, or a list of parts of type text", content)
    joined = valid_unicode(f"{name}.content", "".join(part["text"] for part in parts))
    return {"role": ROLES[role], "content": joined}


def _is_text_part(part: Any) -> bool:
    return (
        type(part) is dict
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and type(part["text"]) is str
    )


SHARED = {
    "model": Field(text, required=True),
    # Where these five are absent, the settings of the model apply.
    "temperature": Field(number(0.0, 2.0)),
    "top_p": Field(number(0.0, 1.0, above=True)),
    "top_k": Field(whole(0, WHOLE)),
    "min_p": Field(number(0.0, 1.0)),
    "repetition_penalty": Field(number(0.01, 100.0)),
    "presence_penalty": Field(number(-2.0, 2.0), 0.0),
    "frequency_penalty": Field(number(-2.0, 2.0), 0.0),
    "logit_bias": Field(biases, ()),
    "n": Field(whole(1, 128), 1),
    "seed": Field(whole(0, 2**32 - 1)),
    "stop": Field(stops, ()),
    "ignore_eos": Field(flag, False),
    "stream": Field(flag, False),
    "stream_options": Field(stream_options),
    "cache_salt": Field(salt),
    "user": Field(text),  # for the provider's records; jaxkv keeps none
}
FIELDS: dict[str, dict[str, Field]] = {
    "completions": SHARED
    | {
        "prompt": Field(prompt, required=True),
        "max_tokens": Field(whole(0, WHOLE)),
        "logprobs": Field(whole(0, LIKELIEST)),
        "echo": Field(flag, False),
        "best_of": Field(only(1)),
        "suffix": Field(only("")),
    },
    "chat": SHARED
    | {
        "messages": Field(messages, required=True),
        "max_tokens": Field(whole(1, WHOLE)),
        "max_completion_tokens": Field(whole(1, WHOLE)),
        "logprobs": Field(flag, False),
        "top_logprobs": Field(whole(0, LIKELIEST)),
        "response_format": Field(only({"type": "text"})),
        "store": Field(only(False)),
    },
}


def read(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every field of a request. kind: a key of FIELDS. Raises Fault."""
    table = FIELDS[kind]
    unknown = next((name for name in body if name not in table), None)
    if unknown is not None:
        message = f"unknown or unsupported field {shown(unknown)}; leave it out"
        raise Fault(400, message, param=unknown[:60])
    values = {}
    for name, field in table.items():
        value = body.get(name)
        if value is None and field.required:
            raise Fault(400, f"{name} is missing; give it", param=name)
        values[name] = field.default if value is None else field.check(name, value)
    if values["stream_options"] is not None and not values["stream"]:
        message = "stream_options is for streams, got stream=false; leave it out"
        raise Fault(400, message, param="stream_options")
    if values.get("top_logprobs") is not None and not values["logprobs"]:
        message = "top_logprobs needs logprobs, got logprobs=false; set it to true"
        raise Fault(400, message, param="top_logprobs")
    return values
