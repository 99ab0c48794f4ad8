"""Verdicts on MagicPIG follow the numbers."""

from __future__ import annotations

import pytest

from jaxkv.evals.lib.claim import HOLDS, NOT, PART
from jaxkv.evals.magicpig import claims as claims


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
    text, found = claims.oracle_beats_topk(record(of_drawn, of_model))
    assert found == verdict and "crossing at" in text


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
    text, found = claims.centring(record(drawn(0.5, 0.03), model(0.5, 0.3, uncentred=share)))
    assert found == verdict and f"{share:.2%} found" in text


@pytest.mark.parametrize(("times", "verdict"), [((3, 2), HOLDS), ((3, 1.2), PART), ((1, 1), NOT)])
def test_speed(times, verdict):
    sizes = {
        str(tokens): {
            "times_faster": {"median": ratio, "min": 1.0, "max": 4.0},
            "share_read": 0.1, "share_met": 0.02, "seconds_to_make_tables": {"median": 1.0},
            "seconds_to_make_them_anew": {"median": 0.5},
        }
        for tokens, ratio in zip((131072, 32768), times, strict=True)
    }  # fmt: skip
    assert claims.faster({"group": 4, "sizes": sizes})[1] == verdict


def test_nothing_breaks_a_table():
    """A bar in a text would begin another column."""
    from jaxkv.evals.lib.record import RESULTS, read

    if not (RESULTS / "sampling.json").exists():
        pytest.skip("no record yet")
    results = read("sampling")["results"]
    for claim in claims.MAGICPIG:
        if claim.experiment == "sampling":
            assert "|" not in claim.find(results)[0]
