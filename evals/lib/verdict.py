"""Claims as data: what is compared, in which record, in which direction, by how much.

An experiment's module lists its claims; `verdict` decides them all. A comparison holds if the whole
interval of the measurement is on the claimed side: two standard errors, or the range of the rounds.

    claim("Table 1: 5158 against 5.40", "A window alone loses over 0.1 nats", "streaming_tables",
          above("tables/{size}/rows/0+{size}", by=0.1))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from jaxkv.evals.lib.record import standard_error

HOLDS, PART, NOT, OPEN = "holds", "holds in part", "does not hold here", "not run here"
UNSEEN = "cannot be told here"  # it was run, but the effect did not occur
Results = dict[str, Any]
NAME = re.compile(r"\{(\w+)\}")


class Value(NamedTuple):
    """A measured value: its mean or median, and the ends of its interval.

    by: how the interval was formed: "±", two standard errors; "to", the range; "", no interval.
    """

    middle: float
    low: float
    high: float
    by: str = ""


# Of the results: measurements by the name of their case.
Derived = Callable[[Results], Mapping[str, Any]]


class Comparison(NamedTuple):
    """One measurement beside another, or beside a number.

    case: the path of the measurement in the results, or a function that computes several. A part
    `{name}` of a path stands for every key there, and for the same key in `base`.
    direction: ">", "<" or "=". base: a path, or a number. by: the margin, in the unit of the claim.
    sure: whether the interval decides; otherwise the mean or median does.
    """

    case: str | Derived
    direction: str
    base: str | float = 0.0
    by: float = 0.0
    sure: bool = True


def above(case: str | Derived, base: str | float = 0.0, by: float = 0.0, sure: bool = True):
    """The case is greater than the base by more than the margin."""
    return Comparison(case, ">", base, by, sure)


def below(case: str | Derived, base: str | float = 0.0, by: float = 0.0, sure: bool = True):
    """The case is less than the base by more than the margin."""
    return Comparison(case, "<", base, by, sure)


def within(case: str | Derived, base: str | float = 0.0, by: float = 0.0, sure: bool = True):
    """The case differs from the base by at most the margin."""
    return Comparison(case, "=", base, by, sure)


class Claim(NamedTuple):
    """A sentence that comparisons decide.

    paper: where the paper says it, with its figure. says: the claim. record: the record that
    decides it. comparisons: all hold where the claim holds. unit: a key of UNITS. beside: another
    record, whose results are `beside` among the results. needs: what a run would need, of a claim
    that was not run. seen: comparisons without which the effect did not occur. model: what was
    measured, if it is not all that the record measured.
    """

    paper: str
    says: str
    record: str
    comparisons: Sequence[Comparison]
    unit: str = "nats"
    beside: str = ""
    needs: str = ""
    seen: Sequence[Comparison] = ()
    model: str = ""


def claim(paper: str, says: str, record: str, *comparisons: Comparison, **fields: Any) -> Claim:
    """A claim; its comparisons stand as arguments of their own."""
    return Claim(paper, says, record, comparisons, **fields)


class Statement(NamedTuple):
    """A sentence of a page, or a part of one, that comparisons prove.

    page: its path under the repository's root. says: the words there, however lines break.
    """

    page: str
    says: str
    record: str
    comparisons: Sequence[Comparison]


class Decision(NamedTuple):
    """A comparison of one case: the value that is shown, and whether it is as claimed."""

    case: str
    value: Value
    holds: bool


def measured(data: Any) -> Value:
    """The value of a measurement in a record.

    data: a number; a mean with its standard error; a median with its range; values of equal
    weight, whose mean is taken; or a row of a table of losses.
    Raises ValueError for anything else.
    """
    if isinstance(data, bool | int | float):
        return Value(float(data), float(data), float(data))
    if isinstance(data, list) and data:
        return _interval(mean(data), standard_error(data))
    if "loss_over_base" in data:
        return _interval(data["loss_over_base"], data["standard_error"])
    if "median" in data:
        return Value(data["median"], data["min"], data["max"], "to")
    if "two_errors" in data:
        error = data["two_errors"]
        error = error["stretches"] if isinstance(error, dict) else error
        return _interval(data["mean"], error / 2)
    if "standard_error" in data:
        return _interval(data["mean"], data["standard_error"])
    if "mean" in data:
        return Value(data["mean"], data["min"], data["max"], "to")
    raise ValueError(f"not a measurement: {data!r}")


def _interval(middle: float, error: float | None) -> Value:
    if error is None:  # a single value, of which nothing is sure
        return Value(middle, -math.inf, math.inf, "±")
    return Value(middle, middle - 2 * error, middle + 2 * error, "±")


def differences(case: Any, base: Any) -> Value:
    """The case minus the base: the differences of pairs, or with independent errors."""
    if isinstance(case, list) and isinstance(base, list) and len(case) == len(base):
        return measured([x - y for x, y in zip(case, base, strict=True)])
    x, y = measured(case), measured(base)
    if x.by == y.by == "±":
        errors = math.hypot(x.high - x.middle, y.high - y.middle)
        return _interval(x.middle - y.middle, errors / 2)
    return Value(x.middle - y.middle, x.low - y.high, x.high - y.low, x.by or y.by)


def matches(results: Any, path: str) -> list[tuple[dict[str, str], Any]]:
    """The values at a path, each with the keys that its names stand for.

    Raises ValueError where the results have none.
    """

    def walk(at: Any, parts: Sequence[str], keys: dict[str, str]) -> Iterator[Any]:
        if not parts:
            yield keys, at
            return
        part = NAME.sub(lambda name: keys.get(name[1], name[0]), parts[0])
        name = NAME.fullmatch(part)
        if isinstance(at, list):
            at = {str(number): item for number, item in enumerate(at)}
        if not isinstance(at, dict):
            return
        for key in at if name else at.keys() & {part}:
            yield from walk(at[key], parts[1:], keys | {name[1]: key} if name else keys)

    values = list(walk(results, [part for part in path.split("/") if part], {}))
    if not values:
        raise ValueError(f"a path must match a measurement, {path!r} matches none; correct it")
    return values


def decisions(comparison: Comparison, results: Results) -> Iterator[Decision]:
    """Every case of a comparison."""
    case, direction, base, by, sure = comparison
    pairs = (
        [({"case": name}, data) for name, data in case(results).items()]
        if callable(case)
        else matches(results, case)
    )
    for keys, data in pairs:
        if isinstance(base, str):
            (reference,) = matches(results, NAME.sub(lambda name, k=keys: k[name[1]], base))
            value, reference = differences(data, reference[1]), 0.0
        else:
            value, reference = measured(data), base
        low, high = (value.low, value.high) if sure else (value.middle, value.middle)
        holds = {
            ">": low > reference + by,
            "<": high < reference - by,
            "=": reference - by <= low and high <= reference + by,
        }[direction]
        yield Decision(", ".join(keys.values()) or _row(case), value, holds)


def _row(path: str) -> str:
    """The row of a table that a path without names ends in, which tells it from other rows."""
    return path.partition("/rows/")[2].partition("/")[0]


def decide(claim: Claim | Statement, results: Results) -> tuple[list[Decision], str]:
    """The decisions of a claim's comparisons, and the verdict."""
    conditions = claim.seen if isinstance(claim, Claim) else ()
    cases = [x for comparison in claim.comparisons for x in decisions(comparison, results)]
    seen = [x for comparison in conditions for x in decisions(comparison, results)]
    if not cases or (conditions and not seen) or not all(x.holds for x in seen):
        return cases, UNSEEN
    return cases, grade([x.holds for x in cases])


def grade(cases: Sequence[bool]) -> str:
    """The verdict on a claim that was tested in several cases."""
    return HOLDS if all(cases) else PART if any(cases) else NOT


UNITS = {  # of a claim: how a value is printed, and its unit
    "nats": (lambda x: f"{round(x, 3) + 0.0:+.3f}", " nats"),  # zero has no sign of its rounding
    "share": (lambda x: f"{100 * x:.1f}", " %"),
    "percent": (lambda x: f"{x:.1f}", " %"),
    "points": (lambda x: f"{100 * x:+.0f}", " points"),  # differences of shares
    "times": (lambda x: f"{x:.2f}", " times"),
    "error": (lambda x: f"{x:.3f}", ""),
    "tokens": (lambda x: f"{x:,.0f}", " tokens"),
    "count": (lambda x: f"{x:,.0f}", ""),
    "number": (lambda x: f"{x:.3g}", ""),
}
SHOWN = 3  # cases; more are summarised


def show(value: Value, unit: str) -> str:
    """A value with its interval and unit."""
    form, name = UNITS[unit]
    middle = form(value.middle)
    if value.by == "±" and math.isfinite(value.low):
        middle += f" ± {form(value.high - value.middle).lstrip('+')}"
    elif value.by == "to" and form(value.low) != form(value.high):
        middle += f" ({form(value.low)} to {form(value.high)})"
    return middle + name


def summary(cases: Sequence[Decision], unit: str) -> str:
    """What was measured: each of a few cases, or how many are as claimed, and their range."""
    if len(cases) <= SHOWN:
        several = len(cases) > 1  # a single case is what the claim names
        return "; ".join(
            f"{x.case}: " * bool(several and x.case) + show(x.value, unit) for x in cases
        )
    form, name = UNITS[unit]
    middles = [x.value.middle for x in cases]
    return (
        f"as claimed in {sum(x.holds for x in cases)} of {len(cases)} cases; "
        f"{form(min(middles))} to {form(max(middles))}{name}"
    )
