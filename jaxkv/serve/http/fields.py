"""The fields of a request: a table with the type, range and default of each.

Unknown fields and unsupported values are refused, because ignoring them would change the answer.
Null in any field is accepted, and so are the values of `neutral`, which ask for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxkv.serve.engine.request import is_unicode
from jaxkv.serve.http.faults import Fault, shown
from jaxkv.serve.http.long_json import PIECE
from jaxkv.serve.http.neutral import EFFORTS, NEUTRAL, STREAM_OPTIONS

WHOLE = 2**31 - 1
LIKELIEST = 20  # log probabilities beside each token
STOPS, STOP_IDS, BIASES = 4, 128, 300
STOP, TEXT = 200, 1000  # characters
LEVELS = 20  # of the variables of a template

Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Field:
    """check: returns the parsed value or raises Fault. default: for absent and null.

    remedy: what to do where a required field is absent.
    """

    check: Check
    default: Any = None
    required: bool = False
    remedy: str = "give it"


def wrong(name: str, rule: str, value: object) -> Fault:
    return Fault(400, f"{name} must be {rule}, got {shown(value)}; correct it", param=name)


def integer(minimum: int, maximum: int) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not minimum <= value <= maximum:
            raise wrong(name, f"a whole number from {minimum} to {maximum}", value)
        return value

    return check


def unlimited(minimum: int) -> Check:
    """A number of tokens, or -1 for no limit of the client's."""

    def check(name: str, value: Any) -> int:
        if type(value) is not int or (value != -1 and not minimum <= value <= WHOLE):
            raise wrong(
                name, f"a whole number from {minimum} to {WHOLE}, or -1 for no limit", value
            )
        return value

    return check


def seed(name: str, value: Any) -> int | None:
    """None draws a seed; clients of llama.cpp send -1 for that."""
    return None if type(value) is int and value == -1 else integer(0, 2**32 - 1)(name, value)


def number(minimum: float, maximum: float, above: bool = False) -> Check:
    """above: `minimum` itself is not allowed."""
    span = (
        f"above {minimum:g} and at most {maximum:g}"
        if above
        else f"from {minimum:g} to {maximum:g}"
    )

    def check(name: str, value: Any) -> float:
        holds = type(value) in (int, float) and minimum <= value <= maximum
        if not holds or (above and value == minimum):
            raise wrong(name, f"a number {span}", value)
        return float(value)

    return check


def likeliest(name: str, value: Any) -> int | None:
    """How many of the likeliest tokens to report; false, as in a chat, asks for none."""
    return None if value is False else integer(0, LIKELIEST)(name, value)


def flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise wrong(name, "true or false", value)
    return value


def text(name: str, value: Any, max_length: int = TEXT) -> str:
    if type(value) is not str or not 0 < len(value) <= max_length:
        raise wrong(name, f"a text of 1 to {max_length} characters", value)
    return value


def note(name: str, value: Any) -> str:
    """A text for the client's records, perhaps empty."""
    return value if value == "" else text(name, value)


def salt(name: str, value: Any) -> str:
    """A text that can be hashed: valid Unicode."""
    return valid_unicode(name, text(name, value))


def valid_unicode(name: str, value: str) -> str:
    """A text without lone surrogates."""
    if not is_unicode(value):
        raise wrong(name, "valid Unicode without lone surrogates", value)
    return value


def among(*values: str) -> Check:
    def check(name: str, value: Any) -> str:
        if type(value) is not str or value not in values:
            raise wrong(name, f"one of {', '.join(values)}", value)
        return value

    return check


def mapping(name: str, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise wrong(name, "an object", value)
    return value


def variables(name: str, value: Any) -> dict[str, Any]:
    """Variables of a chat template."""
    depth, level = 0, [mapping(name, value)]
    while level:
        depth, level = depth + 1, [part for outer in level for part in _parts(outer)]
    if depth > LEVELS:
        raise wrong(name, f"an object of at most {LEVELS} levels", value)
    valid_unicode(name, json.dumps(value, ensure_ascii=False))
    return value


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if type(value) is not list or not (value == [] or _is_ids(value)) or len(value) > STOP_IDS:
        raise wrong(name, f"a list of at most {STOP_IDS} token ids", value)
    return tuple(value)


def top_k(name: str, value: Any) -> int:
    """0 is all tokens; clients of vLLM send -1 for that."""
    count = integer(-1, WHOLE)(name, value)
    return 0 if count == -1 else count


def response_format(name: str, value: Any) -> None:
    if value != {"type": "text"}:
        message = f"{name} must be of type text, got {shown(value)}; jaxkv does not constrain"
        message = f"{message} tokens, so ask for JSON in the prompt and check the answer"
        raise Fault(400, message, param=name)


def stops(name: str, value: Any) -> tuple[str, ...]:
    several = [value] if type(value) is str else value
    if type(several) is not list or len(several) > STOPS:
        raise wrong(name, f"a text or at most {STOPS} of them", value)
    return tuple(text(name, stop, STOP) for stop in several)


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    rule = f"an object of at most {BIASES} token ids, each with a number from -100 to 100"
    if value == []:  # llama.cpp's default
        return ()
    if type(value) is not dict or len(value) > BIASES:
        raise wrong(name, rule, value)
    size = number(-100.0, 100.0)
    for token in value:
        short = len(token) <= len(str(WHOLE))  # before int(), which is slow for thousands of digits
        if not (short and token.isascii() and token.isdigit() and token == str(int(token))):
            raise wrong(name, rule, value)
    return tuple(sorted((int(token), size(name, bias)) for token, bias in value.items()))


def stream_options(name: str, value: Any) -> bool:
    """Whether to send the usage."""
    if type(value) is not dict or value.keys() - {"include_usage", *STREAM_OPTIONS}:
        raise wrong(name, f"an object of include_usage, {', '.join(STREAM_OPTIONS)}", value)
    for option, neutral in STREAM_OPTIONS.items():
        if value.get(option) is not None:
            neutral.check(f"{name}.{option}", value[option])
    return flag(f"{name}.include_usage", value.get("include_usage") or False)


def prompt(name: str, value: Any) -> list[str | list[int]]:
    """A list of texts or of lists of ids, also for one prompt."""
    rule = "a text, a list of token ids, or a list of either"
    several = value if type(value) is list and not _is_ids(value) else [value]
    if not several or not (
        all(type(entry) is str for entry in several)
        or all(type(entry) is list and _is_ids(entry) for entry in several)
    ):
        raise wrong(name, rule, value)
    return [valid_unicode(name, entry) if type(entry) is str else entry for entry in several]


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and all(set(map(type, piece)) == {int} for piece in pieces(value))


def pieces(ids: list[Any]) -> Iterator[list[Any]]:
    """Parts of a long list. Other threads run between two parts, but not within min() or set()."""
    return (ids[start : start + PIECE] for start in range(0, len(ids), PIECE))


MESSAGE = {"role", "content"}
NAMED = MESSAGE | {"name"}
ROLES = {role: role for role in ("system", "user", "assistant")} | {"developer": "system"}


def messages(name: str, value: Any) -> list[dict[str, str]]:
    """Role and content of each message; parts of a content are joined."""
    if type(value) is not list or not value:
        raise wrong(name, "a list of at least one message", value)
    return [_message(f"{name}[{at}]", message) for at, message in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, str]:
    # A client may send an answer's message back; its other fields are null or empty.
    extra = type(value) is dict and any(
        value[key] not in (None, "", [], {}) for key in value.keys() - NAMED
    )
    if type(value) is not dict or extra or not value.keys() >= MESSAGE:
        rule = 'an object with "role" and "content", perhaps "name", and nothing else'
        raise wrong(name, rule, value)
    role, content = value["role"], value["content"]
    if type(role) is not str or role not in ROLES:
        raise wrong(f"{name}.role", f"one of {', '.join(ROLES)}", role)
    parts = [{"type": "text", "text": content}] if type(content) is str else content
    if type(parts) is not list or not all(map(_is_text_part, parts)):
        raise wrong(f"{name}.content", "a text, or a list of parts of type text", content)
    joined = valid_unicode(f"{name}.content", "".join(part["text"] for part in parts))
    message = {"role": ROLES[role], "content": joined}
    if value.get("name") is not None:
        message["name"] = valid_unicode(f"{name}.name", text(f"{name}.name", value["name"]))
    return message


def _is_text_part(part: Any) -> bool:
    return (
        type(part) is dict
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and type(part["text"]) is str
    )


SHARED = {
    "model": Field(text, required=True, remedy="give a name that /v1/models lists"),
    # Where these five are absent, the settings of the model apply.
    "temperature": Field(number(0.0, 2.0)),
    "top_p": Field(number(0.0, 1.0, above=True)),
    "top_k": Field(top_k),
    "min_p": Field(number(0.0, 1.0)),
    "repetition_penalty": Field(number(0.01, 100.0)),
    "presence_penalty": Field(number(-2.0, 2.0), 0.0),
    "frequency_penalty": Field(number(-2.0, 2.0), 0.0),
    "logit_bias": Field(biases, ()),
    "n": Field(integer(1, 128), 1),
    "seed": Field(seed),
    "stop": Field(stops, ()),
    "ignore_eos": Field(flag, False),
    "stream": Field(flag, False),
    "stream_options": Field(stream_options),
    "cache_salt": Field(salt),
    "min_tokens": Field(integer(0, WHOLE), 0),
    "stop_token_ids": Field(token_ids, ()),
    "response_format": Field(response_format),
    # These are for the provider's records and bills; jaxkv has none.
    "user": Field(note),
    "metadata": Field(mapping),
    "service_tier": Field(among("auto", "default")),
    "prompt_cache_key": Field(note),
    "safety_identifier": Field(note),
}
FIELDS: dict[str, dict[str, Field]] = {
    "completions": SHARED
    | {
        "prompt": Field(prompt, required=True),
        "max_tokens": Field(unlimited(0)),
        "logprobs": Field(likeliest),
        "echo": Field(flag, False),
    },
    "chat": SHARED
    | {
        "messages": Field(messages, required=True),
        "max_tokens": Field(unlimited(1)),
        "max_completion_tokens": Field(unlimited(1)),
        "logprobs": Field(flag, False),
        "top_logprobs": Field(integer(0, LIKELIEST)),
        "chat_template_kwargs": Field(variables),
        "reasoning_effort": Field(among(*EFFORTS)),
        "add_generation_prompt": Field(flag),
        "continue_final_message": Field(flag, False),
    },
}


def read(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every field of a request. kind: a key of FIELDS. Raises Fault."""
    table, neutral = FIELDS[kind], NEUTRAL[kind]
    for name, value in body.items():
        if name in neutral and value is not None:
            neutral[name].check(name, value)
        elif name not in table and value is not None:
            message = f"unknown or unsupported field {shown(name)}; leave it out"
            raise Fault(400, message, param=name[:60])
    values = {}
    for name, field in table.items():
        value = body.get(name)
        if value is None and field.required:
            raise Fault(400, f"{name} is missing; {field.remedy}", param=name)
        values[name] = field.default if value is None else field.check(name, value)
    if values["stream_options"] is not None and not values["stream"]:
        message = "stream_options is for streams, got stream=false; leave it out"
        raise Fault(400, message, param="stream_options")
    if values.get("top_logprobs") and not values["logprobs"]:  # 0 asks for none
        message = "top_logprobs needs logprobs, got logprobs=false; set it to true"
        raise Fault(400, message, param="top_logprobs")
    if values.get("continue_final_message"):
        _check_continued(values)
    return values


def _check_continued(values: dict[str, Any]) -> None:
    """Raise Fault unless the last message can be continued."""
    if values["add_generation_prompt"]:
        message = "continue_final_message and add_generation_prompt exclude each other; give one"
        raise Fault(400, message, param="add_generation_prompt")
    role = values["messages"][-1]["role"]
    if role != "assistant":
        message = f"continue_final_message needs a last message of the assistant, got {role}"
        raise Fault(400, f"{message}; leave it out", param="continue_final_message")
