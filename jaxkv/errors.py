"""UserError, the exception for errors that a user can fix; checks that raise it; warnings.

The message of a UserError states the rule, the value received and the remedy.
"""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable
from numbers import Integral, Real

MAX_LISTED = 3  # items of a list in a message


class UserError(ValueError):
    """An error that the user can fix; the command line prints it as one line, exit code 2."""


def warn(message: str) -> None:
    """Warn at the line outside jaxkv that called jaxkv: the line that the user can change."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "jaxkv":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def first_few(items: Iterable[str]) -> str:
    """The first MAX_LISTED items as a list for a message, and how many more there are."""
    items = list(items)
    rest = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(items[:MAX_LISTED]) + rest


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The known word that is most like an unknown one, or begins as it does; None for neither."""
    word, choices = word[:60].lower(), list(choices)
    near = difflib.get_close_matches(word, choices, n=1)
    if not near and len(word) >= 4:
        near = [choice for choice in choices if choice.startswith(word[:4])]
    return near[0] if near else None


def suggestion(word: str, choices: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest of the known ones, and all."""
    choices = list(choices)
    near, listed = nearest(word, choices), ", ".join(choices)
    return f"; did you mean {near!r}? (there are {listed})" if near else f"; there are {listed}"


def is_whole(value: object) -> bool:
    """Whether it is an integer and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_int(name: str, value: object, minimum: int = 1, maximum: int | None = None) -> None:
    """Raise UserError unless value is an integer from `minimum` to `maximum` (None: unlimited)."""
    if not is_whole(value):
        raise UserError(f"{name} must be a whole number, got {value!r}; use {minimum} or more")
    if value < minimum:
        raise UserError(f"{name} must be at least {minimum}, got {value}; use {minimum} or more")
    if maximum is not None and value > maximum:
        raise UserError(f"{name} must be at most {maximum}, got {value}; use {maximum} or less")


def check_positive(name: str, value: object, remedy: str) -> None:
    """Raise UserError unless value is a finite real number above 0."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise UserError(f"{name} must be a finite Python number above 0, got {value!r}; {remedy}")


def check_text(name: str, value: object) -> None:
    """Raise UserError unless value is a str."""
    if not isinstance(value, str):
        raise UserError(f"{name} must be a str, got {value!r:.60}; give a text")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise UserError unless value is one of these names."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        near = nearest(value, choices) if isinstance(value, str) else None
        remedy = f"did you mean {near!r}?" if near else "use one of these"
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}; {remedy}")
