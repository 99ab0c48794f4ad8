"""Verdicts on methods that read a part follow the numbers."""

from __future__ import annotations

import pytest

from jaxkv.evals.lib.claim import HOLDS, NOT, PART
from jaxkv.evals.magicpig import claims_sparse as claims


def loss(more, error=0.001):
    return {"over_full": {"mean": more, "two_errors": {"stretches": error, "seeds": error}}}


def perplexity(at_two, at_ten, quest=0.5, error=0.001):
    def arms(more):
        others = dict.fromkeys(claims.BESIDE, loss(quest))
        return {"magicpig": loss(more, error), **others}

    by_share = {"0.02": arms(at_two), "0.1": arms(at_ten)}
    found = {"full": {"loss": 2.0}, "ends alone": loss(1.0), "shares": by_share}
    return {"perplexity": {"ours": found}}


@pytest.mark.parametrize(
    ("at_two", "at_ten", "error", "verdict"),
    [(0.05, 0.01, 0.01, HOLDS), (0.05, 0.01, 0.06, PART), (0.2, 0.05, 0.01, PART),
     (0.2, 0.2, 0.01, NOT)],
)  # fmt: skip
def test_little_is_lost(at_two, at_ten, error, verdict):
    text, found = claims.little_is_lost(perplexity(at_two, at_ten, error=error))
    assert found == verdict and "the ends alone +1.000" in text


@pytest.mark.parametrize(("quest", "verdict"), [(0.3, HOLDS), (0.1, PART), (0.01, NOT)])
def test_less_than_quest(quest, verdict):
    assert claims.less_than_others(perplexity(0.2, 0.05, quest))[1] == verdict


@pytest.mark.parametrize(("sparse", "verdict"), [((0.3, 0.4), HOLDS), ((0.3, 0.2), PART),
                                                 ((0.1, 0.2), NOT)])  # fmt: skip
def test_questions(sparse, verdict):
    arms = {f"question dense, {i}": loss(0.1 * (i + 1)) for i in range(2)}
    arms |= {f"question sparse, {i}": loss(x) for i, x in enumerate(sparse)}
    record = {"protocol": {"question": 32, "shares": {"0.02": arms}}}
    assert claims.by_question(record)[1] == verdict


@pytest.mark.parametrize(
    ("by_tables", "quest", "verdict"),
    [((0.9, 0.9), 0.5, HOLDS), ((0.5, 0.9), 0.4, PART), ((0.9, 0.9), 0.95, NOT),
     ((0.5, 0.5), 0.1, NOT)],
)  # fmt: skip
def test_answers(by_tables, quest, verdict):
    def right(share):
        return {"right": {"10": share, "40": share}}

    by_share = {
        name: {"magicpig": right(own), **dict.fromkeys(claims.BESIDE, right(quest))}
        for name, own in zip(("0.005", "0.02"), by_tables, strict=True)
    }
    model = {"full": right(0.9), "ends alone": right(0.0), "shares": by_share}
    text, found = claims.answers({"recall": {"seeds": {"0": model}}})
    assert found == verdict and "full 90%" in text


def test_bytes_are_counted():
    def held(share):
        return {"full": {"state_bytes": 100}, "magicpig": {"over_full": share}}

    sizes = {"384": {"full": {"state_bytes": 100}, "magicpig, 2%": {"over_full": 3.0}}}
    sizes |= {"1000": held(1.5)}
    found = {"held": {"uniform, 1/2": {"state_bytes": 50} | loss(0.1)}}
    text, found = claims.at_equal_bytes({"bytes": sizes, "perplexity": {"ours": found}})
    assert found == claims.COUNTED and "uniform, 1/2 (0.50) +0.100" in text and "1.50" in text


@pytest.mark.parametrize(("times", "verdict"), [((2.0, 3.0), HOLDS), ((1.1, 3.0), PART),
                                                ((0.5, 1.0), NOT)])  # fmt: skip
def test_tokens(times, verdict):
    def found(faster):
        spread = {"median": faster, "min": faster, "max": faster}
        return {
            "layers": 1, "of": 12, "tokens_per_second": {"full": spread}, "times_faster": spread,
            "share_met": {"mean": 0.02}, "seconds_to_seal": 3.0,
        }  # fmt: skip

    record = {"tokens": {str(i + 1): found(x) for i, x in enumerate(times)}}
    assert claims.written_faster(record)[1] == verdict


@pytest.mark.parametrize(("other", "verdict"), [(50, HOLDS), (200, NOT), (None, NOT)])
def test_tuning(other, verdict):
    def point(size):
        return size and {"K": 4, "L": 9, "share": 0.1, "of_cache": 0.2, "table_bytes": size}

    least = {"simhash": point(100), "crosspolytope": point(other)}
    record = {"target": 0.1, "models": {"ours": {"least": least}}}
    assert claims.tuned(record)[1] == verdict
