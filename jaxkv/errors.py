"""The one exception a user can mend: the rule, what was received, the remedy."""

from __future__ import annotations

from numbers import Integral


class UserError(ValueError):
    """Something the user can put right; the command line prints it as one line, exit code 2."""


def whole(name: str, value: object, least: int = 1) -> None:
    """Raise UserError unless value is a whole number of so much or more."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name} must be a whole number, got {value!r}; give {least} or more")
    if value < least:
        raise UserError(f"{name} must be at least {least}, got {value}; give {least} or more")
