"""Verdicts on claims: values, intervals, cases by name, and the statements of pages."""

import pytest

from jaxkv.evals.lib import verdict
from jaxkv.evals.lib.verdict import (
    HOLDS,
    NOT,
    PART,
    UNSEEN,
    Statement,
    above,
    below,
    claim,
    decide,
    within,
)

ROW = {"loss_over_base": 0.5, "standard_error": 0.1}


@pytest.mark.parametrize(
    "comparison, holds",
    [
        (above("row", 0.2), True),
        (above("row", 0.4), False),  # within the interval
        (above("row", 0.4, sure=False), True),
        (above("row", by=0.2), True),
        (below("row", 0.8), True),
        (below("row", 0.6), False),
        (within("row", by=0.8), True),
        (within("row", by=0.6), False),
        (within("row", 0.5, by=0.2), True),
    ],
)
def test_the_whole_interval_decides(comparison, holds):
    (outcome,) = verdict.decisions(comparison, {"row": ROW})
    assert outcome.holds == holds


def test_pairs_are_compared_as_pairs():
    """Differences of pairs vary less than the values."""
    (outcome,) = verdict.decisions(above("x", "y"), {"x": [1.0, 9.0], "y": [0.5, 8.4]})
    assert outcome.holds
    (outcome,) = verdict.decisions(above("x", "y"), {"x": [1.0, 9.0, 9.0], "y": [0.5, 8.4]})
    assert not outcome.holds


@pytest.mark.parametrize("values, expected", [((1, 1), HOLDS), ((1, -1), PART), ((-1, -1), NOT)])
def test_a_claim_holds_in_all_cases_in_some_or_in_none(values, expected):
    results = {"cases": {f"case {n}": x for n, x in enumerate(values)}}
    assert decide(claim("", "", "", above("cases/{name}")), results)[1] == expected
    assert decide(claim("", "", "", above(lambda _: {})), results)[1] == UNSEEN


def test_an_effect_that_did_not_occur_tells_nothing():
    gated = claim("", "", "", above("x"), seen=[above("gate", 0.9)])
    assert decide(gated, {"x": 1, "gate": 0.5})[1] == UNSEEN
    assert decide(gated, {"x": 1, "gate": 0.95})[1] == HOLDS


@pytest.mark.parametrize("comparison", [above("y"), above("x", "y"), above("x/{case}/z")])
def test_a_path_that_matches_nothing_is_an_error(comparison):
    """In a claim, in its base, in the effect that must occur, and in a statement."""
    for decided in (
        claim("", "", "", comparison),
        claim("", "", "", above("x/a"), seen=[comparison]),
        Statement("", "", "", [comparison]),
    ):
        with pytest.raises(ValueError, match="matches none"):
            decide(decided, {"x": {"a": 1}})
