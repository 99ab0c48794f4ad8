"""Verdicts on sampled caches and BalanceKV by the numbers of a record."""

from __future__ import annotations

import pytest

from jaxkv.evals.balancekv import claims as balance
from jaxkv.evals.lib.claim import HOLDS, NOT, PART, UNSEEN
from jaxkv.evals.reservoir import claims


def chi_squares(uniform, geometric):
    reported = {"uniform": uniform, "geometric": geometric}
    return {
        "reservoir": {"test": reported | {"tokens": 64, "sample": 8, "seeds": 4000}, "other": {}}
    }


def costs(ratio):
    line = {"median": ratio, "min": 1.0, "max": 2.0}
    return {"token": {"slots": 256, "ratio": {"reservoir": line, "stratified": line}}}


def answers(*models, near=1.0):
    """Right answers beyond the window by policy, per trained model; within it all are right."""
    found = {
        str(seed): {"within": {
            name: {"right": {"16": near, "200": share - 0.1, "300": share + 0.1}}
            for name, share in far.items()
        }}
        for seed, far in enumerate(models)
    }  # fmt: skip
    return {"slots": 128, "left": 141, "context": 512, "seeds": found,
            "compressed": ["balance", "uniform", "snapkv", "pyramidkv"]}  # fmt: skip


def memory(*shares, listing=0.5, streaming=0.1):
    """Right answers of the reservoir, per model."""
    names = ("full", "reservoir, weighted", "stratified", "balance-stream", "h2o")
    others = dict.fromkeys(names, 0.5) | {"streaming": streaming, "reservoir, geometric": listing}
    return answers(*(others | {"reservoir": share} for share in shares))


def samples(*shares):
    names = ("sample 16", "sample 64", "sample 256")
    found = {}
    for kind in ("reservoir", "stratified"):
        of = [kind if name == "sample 64" else f"{kind}, {name}" for name in names]
        found |= dict(zip(of, shares, strict=True))
    return answers(found)


def compressed(balance, *others):
    names = ("uniform", "snapkv", "pyramidkv", "streaming")
    return answers(dict(zip(names, others, strict=True)) | {"balance": balance}, near=0.5)


def halves(**ratio):
    return {"halving": {f"test[{name}-ordered]": {"ratio": x} for name, x in ratio.items()}}


def slopes(walk, theory):
    lines = {"walk": walk, "theory": theory}
    reported = {f"test[{name}]": {"slope": x, "slope_of_uniform": -0.5, "tokens": 8192}
            for name, x in lines.items()}  # fmt: skip
    return {"levels": reported | {"lost": {"denominator_lost": 0.5, "tokens": 512}}}


def needles(reservoir, streaming=0.0, scored=True):
    """Right answers by quarter of a context of which the first three are evicted."""

    def row(far, near=0.8):
        return {"score": near, "by_depth": [far, far, far, near]}

    rows = {"streaming": row(streaming), "reservoir": row(reservoir)}
    case = {"full": row(1.0, 1.0), "scored": scored, "ratios": {"0.25": rows}}
    return {"samples": 20, "tasks": {"needle": {"1024": case}}}


CASES = {
    "finds evicted needles": (claims.finds_needles, needles(0.3), HOLDS),
    "finds too few": (claims.finds_needles, needles(0.04), NOT),
    "finds no more than streaming": (claims.finds_needles, needles(0.3, 0.3), NOT),
    "a task that full attention fails": (claims.finds_needles, needles(0.3, scored=False), UNSEEN),
    "both as the paper says": (claims.equally_likely, chi_squares(60.0, 70.0), HOLDS),
    "the equations, not the listing": (claims.equally_likely, chi_squares(60.0, 9000.0), PART),
    "not even the equations": (claims.equally_likely, chi_squares(130.0, 9000.0), NOT),
    "no slower": (claims.as_fast, costs(1.04), HOLDS),
    "slower": (claims.as_fast, costs(1.2), NOT),
    "remembers": (claims.remembers, memory(0.4, 0.3), HOLDS),
    "remembers by the equations": (claims.remembers, memory(0.4, listing=0.1), PART),
    "remembers in one model of two": (claims.remembers, memory(0.4, 0.1, listing=0.1), NOT),
    "remembers too little to be felt": (claims.remembers, memory(0.14, listing=0.1), NOT),
    "each sample better": (claims.larger_is_better, samples(0.2, 0.4, 0.7), HOLDS),
    "the largest alone": (claims.larger_is_better, samples(0.2, 0.22, 0.6), PART),
    "none better": (claims.larger_is_better, samples(0.2, 0.2, 0.2), NOT),
    "best in small": (balance.in_small, compressed(0.8, 0.4, 0.4, 0.4, 0.4), HOLDS),
    "better than some": (balance.in_small, compressed(0.8, 0.8, 0.4, 0.4, 0.4), PART),
    "better than none": (balance.in_small, compressed(0.4, 0.4, 0.4, 0.4, 0.4), NOT),
    "by every constant": (balance.nearer_on_paper, halves(walk=0.5, pairs=0.5, theory=0.5), HOLDS),
    "not by theory": (balance.nearer_on_paper, halves(walk=0.5, pairs=0.5, theory=1.0), PART),
    "by none": (balance.nearer_on_paper, halves(walk=1.0, pairs=0.5, theory=1.0), NOT),
    "both steep": (balance.falls_faster, slopes(-0.9, -0.9), HOLDS),
    "the practical one": (balance.falls_faster, slopes(-0.9, -0.5), PART),
    "neither": (balance.falls_faster, slopes(-0.5, -0.5), NOT),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_verdicts_depend_on_the_numbers(case):
    find, record, verdict = CASES[case]
    text, found = find(record)
    assert found == verdict, text
