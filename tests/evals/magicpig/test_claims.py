"""Verdicts on MagicPIG by the numbers of a record."""

from __future__ import annotations

import pytest

from jaxkv.evals.lib.claim import HOLDS, NOT, PART
from jaxkv.evals.magicpig import claims


def line(error, over=1.0, spread=0.0, share=0.02):
    return {
        "share": share,
        "error": {"mean": error, "median": error, "standard_error": spread},
        "over_topk": {"mean": over, "standard_error": spread},
    }


def drawn(topk, oracle, crossing=0.7, magicpig=0.05, mass=0.75):
    by = {"K": 10, "L": 150, "magicpig": line(magicpig), "topk": line(topk), "oracle": line(oracle)}
    kinds = {"topk": topk, "oracle": oracle}
    return {
        **{kind: {"0.05": line(error), "0.2": line(error)} for kind, error in kinds.items()},
        "crossing": crossing, "mass_of_top_fifth": mass, "by_tables": [by],
    }  # fmt: skip


def model(topk, oracle, over=1.0, spread=0.0, uncentred=0.0005):
    return {
        "budgets": {"topk": {"0.05": line(topk)}, "oracle": {"0.05": line(oracle)}},
        "captured": {
            "magicpig": {"0.02": line(0.1, over, spread)},
            "magicpig, uncentred": {"0.02": line(0.2, share=uncentred)},
        },
    }


def record(of_drawn, of_model):
    return {"drawn": {"2": of_drawn}, "models": {"ours": of_model}}


@pytest.mark.parametrize(
    ("of_drawn", "of_model", "verdict"),
    [
        (drawn(0.5, 0.03), model(0.5, 0.3), HOLDS),
        (drawn(0.5, 0.03), model(0.1, 0.3), PART),
        (drawn(0.5, 0.03, crossing=0.2), model(0.5, 0.3), NOT),
        (drawn(0.02, 0.03), model(0.5, 0.3), NOT),
    ],
)
def test_oracle_and_top_k(of_drawn, of_model, verdict):
    assert claims.oracle_beats_topk(record(of_drawn, of_model))[1] == verdict


@pytest.mark.parametrize(
    ("magicpig", "over", "spread", "verdict"),
    [(0.05, 0.8, 0.05, HOLDS), (0.05, 0.95, 0.05, PART), (0.05, 2.0, 0.1, PART),
     (0.9, 0.8, 0.05, NOT)],
)  # fmt: skip
def test_tables_and_top_k(magicpig, over, spread, verdict):
    given = record(drawn(0.5, 0.03, magicpig=magicpig), model(0.5, 0.3, over, spread))
    assert claims.beats_topk(given)[1] == verdict


@pytest.mark.parametrize(("share", "verdict"), [(0.0005, HOLDS), (0.009, PART)])
def test_centring(share, verdict):
    given = record(drawn(0.5, 0.03), model(0.5, 0.3, uncentred=share))
    assert claims.centring(given)[1] == verdict


@pytest.mark.parametrize(("times", "verdict"), [((3, 2), HOLDS), ((3, 1.2), PART), ((1, 1), NOT)])
def test_speed(times, verdict):
    sizes = {
        str(tokens): {
            "times_faster": {"median": ratio, "min": 1.0, "max": 4.0},
            "share_read": 0.1, "share_attended": 0.02, "seconds_to_make_tables": {"median": 1.0},
            "seconds_to_rebuild_tables": {"median": 0.5},
        }
        for tokens, ratio in zip((131072, 32768), times, strict=True)
    }  # fmt: skip
    assert claims.faster({"group": 4, "sizes": sizes})[1] == verdict


def loss(more, error=0.001):
    return {"over_full": {"mean": more, "two_errors": {"stretches": error, "seeds": error}}}


def perplexity(at_two, at_ten, quest=0.5, error=0.001):
    def variants(more):
        others = dict.fromkeys(claims.METHODS[1:], loss(quest))
        return {"magicpig": loss(more, error), **others}

    by_share = {"0.02": variants(at_two), "0.1": variants(at_ten)}
    found = {"full": {"loss": 2.0}, "ends alone": loss(1.0), "shares": by_share}
    return {"perplexity": {"ours": found}}


@pytest.mark.parametrize(
    ("at_two", "at_ten", "error", "verdict"),
    [(0.05, 0.01, 0.01, HOLDS), (0.05, 0.01, 0.06, PART), (0.2, 0.05, 0.01, PART),
     (0.2, 0.2, 0.01, NOT)],
)  # fmt: skip
def test_little_is_lost(at_two, at_ten, error, verdict):
    assert claims.little_is_lost(perplexity(at_two, at_ten, error=error))[1] == verdict


@pytest.mark.parametrize(("quest", "verdict"), [(0.3, HOLDS), (0.1, PART), (0.01, NOT)])
def test_less_than_quest(quest, verdict):
    assert claims.less_than_others(perplexity(0.2, 0.05, quest))[1] == verdict


@pytest.mark.parametrize(("sparse", "verdict"), [((0.3, 0.4), HOLDS), ((0.3, 0.2), PART),
                                                 ((0.1, 0.2), NOT)])  # fmt: skip
def test_questions(sparse, verdict):
    variants = {f"question dense, {i}": loss(0.1 * (i + 1)) for i in range(2)}
    variants |= {f"question sparse, {i}": loss(x) for i, x in enumerate(sparse)}
    record = {"protocol": {"question": 32, "shares": {"0.02": variants}}}
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
        name: {"magicpig": right(own), **dict.fromkeys(claims.METHODS[1:], right(quest))}
        for name, own in zip(("0.005", "0.02"), by_tables, strict=True)
    }
    model = {"full": right(0.9), "ends alone": right(0.0), "shares": by_share}
    assert claims.answers({"recall": {"seeds": {"0": model}}})[1] == verdict


@pytest.mark.parametrize(("times", "verdict"), [((2.0, 3.0), HOLDS), ((1.1, 3.0), PART),
                                                ((0.5, 1.0), NOT)])  # fmt: skip
def test_tokens(times, verdict):
    def found(faster):
        spread = {"median": faster, "min": faster, "max": faster}
        return {
            "layers": 1, "of": 12, "tokens_per_second": {"full": spread}, "times_faster": spread,
            "share_attended": {"mean": 0.02}, "seconds_to_index": 3.0,
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
