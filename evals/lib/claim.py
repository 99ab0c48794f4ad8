"""A claim of a paper, and helpers of verdict functions: rules, look-ups and formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

HOLDS, PART, NOT, OPEN = "holds", "holds in part", "does not hold here", "not run here"
UNSEEN = "cannot be told here"  # it was run, but the effect did not occur
Results = dict[str, Any]
Finding = tuple[str, str]  # the measured figures as text; the verdict
Find = Callable[..., Finding]  # of the results, and of those beside them


@dataclass(frozen=True)
class Claim:
    """says: the claim. paper: where the paper makes it. record: the record that decides it.

    find: the verdict function, or a string that says what a run would need. model: what was
    measured, if it is not all that the record measured. beside: another record, whose results are
    the second argument of the verdict function.
    """

    says: str
    paper: str
    record: str
    find: Find | str
    model: str = ""
    beside: str = ""


def adder(claims: list[Claim]) -> Callable[..., Callable[[Find], Find]]:
    """A decorator `(record, says, paper, model="", beside="")` that appends a claim with its
    verdict function."""

    def claim(
        record: str, says: str, paper: str, model: str = "", beside: str = ""
    ) -> Callable[[Find], Find]:
        def add(find: Find) -> Find:
            claims.append(Claim(says, paper, record, find, model, beside))
            return find

        return add

    return claim


def grade(whole: bool, part: bool = False) -> str:
    return HOLDS if whole else PART if part else NOT


def by_all(cases: Sequence[bool]) -> str:
    """The verdict on a claim that was tested in several cases."""
    return grade(all(cases), any(cases))


def pick(results: Any, path: str) -> Any:
    """The value at a path such as a/b, or with one `*` a dict of the values by that key."""
    if "*" in path:
        before, after = path.split("*")
        return {key: pick(value, after.strip("/")) for key, value in pick(results, before).items()}
    return reduce(lambda at, key: at[key], filter(None, path.split("/")), results)


def listed(values: Mapping[str, Any], show: Callable[[Any], str] = "{:.2f}".format) -> str:
    return ", ".join(f"{name} {show(x)}" for name, x in values.items())


def joined(parts: Iterable[str]) -> str:
    return "; ".join(parts)


def percent(share: str) -> str:
    return f"{float(share):.0%}"


def spread(x: Mapping[str, float], digits: int = 2, middle: str = "median") -> str:
    """The median, or the mean, and the range."""
    one, least, most = (f"{x[name]:.{digits}f}" for name in (middle, "min", "max"))
    return f"{one} ({least} to {most})"


def ranged(x: Mapping[str, float], middle: str, form: str) -> str:
    """The median, or the mean, and the range where it differs as printed."""
    at, least, most = (format(x[name], form) for name in (middle, "min", "max"))
    return at if least == most else f"{at} ({least} to {most})"


def table_head(*heads: str) -> list[str]:
    """The first two lines of a table in Markdown."""
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]


def interval(x: Mapping[str, float]) -> str:
    """The mean with two standard errors."""
    return f"{x['mean']:.2f} ± {2 * x['standard_error']:.2f}"


def over_base(line: Results) -> str:
    """A loss minus the base, with two standard errors where there are several texts."""
    error = line["standard_error"]
    return f"({line['loss_over_base']:+.4f}" + (")" if error is None else f" ± {2 * error:.4f})")
