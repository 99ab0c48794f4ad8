"""CLAIMS.md and README say what the records say."""

import json

import pytest

from evals import claims, figures


def test_the_page_of_claims_is_in_step():
    assert claims.PAGE.read_text("utf-8") == claims.page(), "run python -m evals.claims"


def test_the_figures_in_readme_are_in_step():
    text = figures.README.read_text("utf-8")
    assert figures.fill(text) == text, "run python -m evals.figures"


def test_a_figure_is_filled_in(tmp_path):
    results = {"results": {"table": [{"times": {"median": 21.456}}]}}
    (tmp_path / "trial.json").write_text(json.dumps(results))
    text = "It is <!--=trial table/0/times/median .1f-->2.0<!--/--> times as fast."
    done = figures.fill(text, tmp_path)
    assert done == "It is <!--=trial table/0/times/median .1f-->21.5<!--/--> times as fast."
    assert figures.fill(done, tmp_path) == done


@pytest.mark.parametrize("change, verdict", [(0.004, claims.HOLDS), (0.006, claims.NOT)])
def test_a_verdict_follows_the_numbers(tmp_path, change, verdict):
    summary = {
        "worst_change": change,
        "worst_change_wrapped": 0.0,
        "not_finite": 0,
        "resident_bytes": {"growth": 0},
    }
    results = {"policy": "p", "tokens": 1, "block": 1, "endless": [], "summary": summary}
    (tmp_path / "endless.json").write_text(json.dumps({"command": "c", "results": results}))
    (line,) = [row for row in claims.page(tmp_path).splitlines() if row.startswith("| Stable")]
    assert f"**{verdict}**" in line


def test_without_records_nothing_is_claimed(tmp_path):
    assert "**" not in claims.page(tmp_path)
