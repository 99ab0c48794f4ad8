"""Checks of single values in the fields of a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jaxkv.errors import nearest
from jaxkv.serve.engine.request import is_unicode
from jaxkv.serve.http.errors import APIError, shown

MAX_COUNT = 2**31 - 1
MAX_STOP_IDS = 128
MAX_TEXT = 1000  # characters
MAX_LEVELS, MAX_SCHEMA_LEVELS = 20, 64  # of the variables of a template, of a tool's schema
Check = Callable[[str, Any], Any]


def invalid(name: str, rule: str, value: object) -> APIError:
    return APIError(400, f"{name} must be {rule}, got {shown(value)}; correct it", param=name)


def check_of(
    rule: str, accepts: Callable[[Any], bool], parse: Callable[[Any], Any] = lambda value: value
) -> Check:
    """A check of one rule. rule: what the value must be, in words."""

    def check(name: str, value: Any) -> Any:
        if not accepts(value):
            raise invalid(name, rule, value)
        return parse(value)

    return check


def integer(minimum: int, maximum: int) -> Check:
    rule = f"a whole number from {minimum} to {maximum}"
    return check_of(rule, lambda value: type(value) is int and minimum <= value <= maximum)


def token_limit(minimum: int) -> Check:
    """A number of tokens, or -1 for no limit of the client's."""
    rule = f"a whole number from {minimum} to {MAX_COUNT}, or -1 for no limit"
    return check_of(
        rule, lambda value: type(value) is int and (value == -1 or minimum <= value <= MAX_COUNT)
    )


def number(minimum: float, maximum: float) -> Check:
    rule = f"a number from {minimum:g} to {maximum:g}"
    return check_of(rule, lambda value: is_number(value) and minimum <= value <= maximum, float)


def text_up_to(max_length: int, min_length: int = 1) -> Check:
    rule = f"a text of {min_length} to {max_length} characters"
    return check_of(
        rule, lambda value: type(value) is str and min_length <= len(value) <= max_length
    )


def one_of(*values: str) -> Check:
    rule = f"one of {', '.join(values)}"
    return check_of(rule, lambda value: type(value) is str and value in values)


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def is_ids(value: list[Any]) -> bool:
    return set(map(type, value)) == {int}


def equal(value: Any, accepted: Any) -> bool:
    """Equal, where true is not 1 but 1.0 is; a type accepts each value of it."""
    if isinstance(accepted, type):
        return type(value) is accepted
    return value == accepted and (type(value) is bool) == (type(accepted) is bool)


text = text_up_to(MAX_TEXT)
long_text = text_up_to(MAX_COUNT, 0)
flag = check_of("true or false", lambda value: type(value) is bool)
mapping = check_of("an object", lambda value: type(value) is dict)
top_p = check_of(
    "a number above 0 and at most 1", lambda value: is_number(value) and 0 < value <= 1, float
)
token_ids = check_of(
    f"a list of at most {MAX_STOP_IDS} token ids",
    lambda value: type(value) is list and is_ids(value or [0]) and len(value) <= MAX_STOP_IDS,
    tuple,
)


def unless(sentinel: Any, replacement: Any, check: Check) -> Check:
    """A check that also accepts `sentinel`, which clients send for `replacement`."""

    def check_others(name: str, value: Any) -> Any:
        is_sentinel = type(value) is type(sentinel) and value == sentinel
        return replacement if is_sentinel else check(name, value)

    return check_others


def valid_unicode(name: str, value: str) -> str:
    """A text without lone surrogates."""
    if not is_unicode(value):
        raise invalid(name, "valid Unicode without lone surrogates", value)
    return value


def salt(name: str, value: Any) -> str:
    """A text that can be hashed."""
    return valid_unicode(name, text(name, value))


def variables(name: str, value: Any, max_levels: int = MAX_LEVELS) -> dict[str, Any]:
    """Variables of a chat template."""
    depth, level = 0, [mapping(name, value)]
    while level:
        depth, level = depth + 1, [part for outer in level for part in _parts(outer)]
    if depth > max_levels:
        raise invalid(name, f"an object of at most {max_levels} levels", value)
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise invalid(name, "an object with finite numbers", value) from None
    valid_unicode(name, written)
    return value


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def check_keys(name: str, value: Mapping[str, Any], accepted: set[str]) -> None:
    if unknown := sorted(value.keys() - accepted):
        message = f"{name} has an unknown member {shown(unknown[0])}; leave it out"
        raise APIError(400, message, param=name)


def check_members(name: str, value: Mapping[str, Any], accepted: set[str]) -> None:
    """Raise APIError for a member that is not accepted, unless it is null or empty.

    A client may send a part of an answer back, whose other members are.
    """
    if any(value[key] not in (None, "", [], {}) for key in value.keys() - accepted):
        raise invalid(name, f"an object of {', '.join(sorted(accepted))}, and nothing else", value)


def check_known(body: Mapping[str, Any], accepted: Collection[str]) -> None:
    """Raise APIError for a field that is not accepted, unless it is null."""
    for name, value in body.items():
        if name not in accepted and value is not None:
            near = nearest(name, accepted)
            remedy = f"did you mean {near}?" if near else "leave it out"
            message = f"unknown or unsupported field {shown(name)}; {remedy}"
            raise APIError(400, message, param=name[:60])
