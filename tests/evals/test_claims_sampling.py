"""Verdicts on samples of the past follow the numbers."""

from __future__ import annotations

import pytest

from evals import claims_sampling as claims
from evals.claim import HOLDS, NOT, PART

METHODS = (
    "balance, pairs",
    "balance, walk",
    "stratified",
    "uniform, weighted",
    "uniform",
    "snapkv",
)


def chi_squares(uniform, geometric):
    return {"reservoir": {"test": {"uniform": uniform, "geometric": geometric}}}


def tokens(ratio):
    line = {"median": ratio, "min": ratio, "max": ratio}
    return {"token": {"slots": 256, "ratio": {"reservoir": line, "stratified": line}}}


def books(**loss):
    caches = {name: {"loss": value} for name, value in loss.items()}
    return {"worth": {"tokens": 1000, "caches": caches}}


def answers(far, near=1.0):
    """Right answers beyond the window by policy; within it all are right."""
    within = {
        name: {"right": {"16": near, "200": share, "300": share}} for name, share in far.items()
    }
    return {"slots": 128, "policies": dict.fromkeys(far), "seeds": {"0": {"within": within}}}


def memory(reservoir, streaming=0.1):
    names = {"full": 1.0, "stratified": 0.5, "balance-stream": 0.5}
    return answers({**names, "streaming": streaming, "reservoir": reservoir})


def samples(*shares):
    names = [f"reservoir, sample {4 ** (i + 2)}" for i in range(len(shares))]
    return answers(dict(zip(names, shares, strict=True)))


def errors(*rows):
    """Of each T the error of each method, in the order of METHODS, the same by every seed."""
    summary = {
        name: {str(t + 1): {"median": row[i], "min": row[i], "max": row[i]}
               for t, row in enumerate(rows)}
        for i, name in enumerate(METHODS)
    }  # fmt: skip
    saturated = {"walk": 0.5, "pairs": 0.5}
    return {"tokens": 1000, "rounds": [*range(1, len(rows) + 1)], "summary": summary,
            "saturated": saturated}  # fmt: skip


def halves(**ratio):
    return {"halving": {f"test[{name}]": {"ratio": x} for name, x in ratio.items()}}


def slopes(walk, theory):
    lines = {"walk": walk, "theory": theory}
    told = {f"test[{n}]": {"slope": x, "slope_of_uniform": -0.5} for n, x in lines.items()}
    return {"levels": told | {"lost": {"denominator_lost": 0.5}}}


CASES = {
    "both as the paper says": (claims.equally_likely, chi_squares(60.0, 70.0), HOLDS),
    "the equations, not the listing": (claims.equally_likely, chi_squares(60.0, 9000.0), PART),
    "not even the equations": (claims.equally_likely, chi_squares(130.0, 9000.0), NOT),
    "no slower": (claims.as_fast, tokens(1.04), HOLDS),
    "slower": (claims.as_fast, tokens(1.2), NOT),
    "lower loss": (claims.loses_nothing, books(streaming=4.0, reservoir=3.9), HOLDS),
    "higher loss": (claims.loses_nothing, books(streaming=4.0, reservoir=4.1), NOT),
    "remembers": (claims.remembers, memory(0.4), HOLDS),
    "remembers too little to be felt": (claims.remembers, memory(0.14), NOT),
    "each sample better": (claims.larger_is_better, samples(0.1, 0.3, 0.6), HOLDS),
    "the largest alone": (claims.larger_is_better, samples(0.1, 0.12, 0.6), PART),
    "none better": (claims.larger_is_better, samples(0.1, 0.1, 0.1), NOT),
    "nearest of all": (
        claims.nearer_than_uniform, errors((0.1, 0.1, 0.2, 0.3, 0.4, 0.5)), HOLDS),
    "no nearer than stratified": (
        claims.nearer_than_uniform, errors((0.2, 0.2, 0.2, 0.3, 0.4, 0.5)), PART),
    "at one T of two": (
        claims.nearer_than_uniform,
        errors((0.1, 0.1, 0.2, 0.3, 0.4, 0.5), (0.5, 0.5, 0.6, 0.3, 0.4, 0.5)), PART),
    "no nearer than uniform": (
        claims.nearer_than_uniform, errors((0.3, 0.3, 0.2, 0.3, 0.4, 0.5)), NOT),
    "by every constant": (claims.nearer_on_paper, halves(walk=0.5, pairs=0.5, theory=0.5), HOLDS),
    "not by the theorem's": (claims.nearer_on_paper, halves(walk=0.5, pairs=0.5, theory=1.0), PART),
    "by none": (claims.nearer_on_paper, halves(walk=1.0, pairs=0.5, theory=1.0), NOT),
    "both steep": (claims.falls_faster, slopes(-0.9, -0.9), HOLDS),
    "the practical one": (claims.falls_faster, slopes(-0.9, -0.5), PART),
    "neither": (claims.falls_faster, slopes(-0.5, -0.5), NOT),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_verdicts_follow_the_numbers(case):
    find, record, verdict = CASES[case]
    text, found = find(record)
    assert found == verdict, text
