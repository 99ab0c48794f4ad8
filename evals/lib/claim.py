"""What one claim is, and what may come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

HOLDS, PART, NOT, OPEN = "holds", "holds in part", "does not hold here", "not run here"
UNSEEN = "cannot be told here"  # it was run, and what the claim is about did not come up
Finding = tuple[str, str]  # what we measured, at which size; the verdict
Results = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """says: the claim. paper: its figure there. experiment: the record that speaks to it."""

    says: str
    paper: str
    experiment: str
    find: Callable[[Results], Finding] | str  # a string: what it would need


def by_all(cases: Sequence[bool]) -> str:
    """The verdict on a claim that was looked at in several cases."""
    return HOLDS if all(cases) else PART if any(cases) else NOT


def over_base(line: Results) -> str:
    """By how much a loss exceeds the base, with two standard errors."""
    return f"({line['loss_over_base']:+.4f} ± {2 * line['standard_error']:.4f})"
