"""The one exception a user can mend: the rule, what was received, the remedy."""

from __future__ import annotations

from numbers import Integral


class UserError(ValueError):
    """Something the user can put right; the command line prints it as one line, exit code 2."""


def whole(name: str, value: object) -> None:
    """Raise UserError unless value is a whole number of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name} must be a whole number, got {value!r}; give 1 or more")
    if value < 1:
        raise UserError(f"{name} must be at least 1, got {value}; give 1 or more")
