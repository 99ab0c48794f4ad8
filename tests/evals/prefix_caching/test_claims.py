"""Verdicts on prefix caching by the numbers of a record."""

from __future__ import annotations

import pytest

from jaxkv.evals.lib.claim import HOLDS, NOT, PART
from jaxkv.evals.prefix_caching import claims


def three(value, low=None, high=None, middle="mean"):
    return {middle: value, "min": value if low is None else low,
            "max": value if high is None else high}  # fmt: skip


def curves(*rows):
    """Hit rates of each setting at p = 0.1, 0.2, ..."""
    return {"report": {"curves": {
        f"mode {n}": {f"{0.1 * (i + 1):g}": three(y) for i, y in enumerate(row)}
        for n, row in enumerate(rows)
    }}}  # fmt: skip


def prompts(short, greedy):
    """Hit rates of the short prompt, and of the longer one with equal answers; else 8."""
    identical = {"alias, block 16": {"16": three(99.9)}, "rekey, block 16": {"16": three(8.0)}}
    return {"report": {
        "what_is_your_name": {"rekey, block 16": short}, "ten_seeds": {"16": three(8.0)},
        "greedy": three(greedy), "identical": identical,
    }}  # fmt: skip


def items(*times):
    one = {"max_batch": 16, "chunk": 8, "items_per_second": dict.fromkeys(
        ("none", "cached"), three(40.0, middle="median"))}  # fmt: skip
    shares = {f"{0.5 * (n + 1):g}": one | {"times_faster": time} for n, time in enumerate(times)}
    return {"report": {"shares": shares}}


def hashing(chained, direct):
    took = {"chained": chained, "direct": direct}
    return {"speed": {"microseconds_of_4096_tokens": took}}


def agents(*shares, memory=10):
    """By policy, the saved share of what full saves, at the larger of two numbers of entries."""
    point = {"distinct": memory // 2, "bytes": memory, "saved": 5, "of_full": 0.1}
    found = {
        f"policy{n}:x=1": {"entries": {"4": point, "64": point | {"saved": 90, "of_full": share}}}
        for n, share in enumerate(shares)
    }
    return {"turns": 5, "tokens": 200, "chunk": 8, "policies": found,
            "full": {"share": 0.5, "saved": 100, "bytes": 1000}}  # fmt: skip


def loads(*least):
    """The minimal speed-up of each load."""
    first = {"none": {"median": 0.2}, "cached": {"median": 0.1}}
    return {
        name: {"streaming:x=1": {
            "times_faster": three(1.5, least, 2.0, "median"), "hit_rate_tokens": 0.5,
            "first_token_seconds": first,
        }}
        for name, least in zip(("sessions", "mooncake", "azure"), least, strict=True)
    }  # fmt: skip


def soak(*met):
    rests = [{"resident": size} for size in (10, 20, 21)]
    lives = [{"rests": rests, "unfairness": [1.1]}]
    found = {"requests": 10, "left": 3, "wrong": 0, "lives": lives}
    return {"policies": {"full": {"growing": found}}, "bars": [{"met": one} for one in met]}


LINE = [8 * n for n in range(1, 11)]
BENT = [n**3 / 50 for n in range(1, 11)]
QUICK, SLOW = three(1.2, 1.1, 1.3, "median"), three(1.2, 0.9, 1.3, "median")
CASES = {
    "all straight": (claims.linear, curves(LINE, LINE), HOLDS),
    "one bent": (claims.linear, curves(LINE, BENT), PART),
    "flat is not growing": (claims.linear, curves([0.0] * 10), NOT),
    "the figure and its cause": (claims.one_prompt, prompts(three(8, 7, 9), 50.0), HOLDS),
    "the figure alone": (claims.one_prompt, prompts(three(8, 7, 9), 8.0), PART),
    "not even the figure": (claims.one_prompt, prompts(three(20, 19, 21), 8.0), NOT),
    "faster at every p": (claims.faster, items(QUICK, QUICK), HOLDS),
    "faster where all are equal": (claims.faster, items(SLOW, QUICK), PART),
    "faster at another p alone": (claims.faster, items(QUICK, SLOW), NOT),
    "faster by nothing": (claims.faster, items(three(1.01, 1.005, 1.02, "median")), NOT),
    "chained is quicker": (
        claims.chained, hashing(three(1, 1, 2, "median"), three(5, 4, 6, "median")), HOLDS),
    "chained overlaps": (
        claims.chained, hashing(three(1, 1, 5, "median"), three(5, 4, 6, "median")), NOT),
    "as much in less": (claims.evicting_caches, agents(0.95, 0.92), HOLDS),
    "one of two": (claims.evicting_caches, agents(0.95, 0.5), PART),
    "as much in as much": (claims.evicting_caches, agents(0.95, memory=1000), NOT),
    "all loads sooner": (claims.through_the_engine, loads(1.1, 1.2, 1.01), HOLDS),
    "not where nothing is shared": (claims.through_the_engine, loads(1.1, 1.2, 0.9), PART),
    "none sooner": (claims.through_the_engine, loads(0.9, 0.9, 0.9), NOT),
    "all as before": (claims.soaked, soak(True, True), HOLDS),
    "one leak": (claims.soaked, soak(True, False), PART),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_verdicts_depend_on_the_numbers(case):
    find, record, verdict = CASES[case]
    text, found = find(record)
    assert found == verdict, text
