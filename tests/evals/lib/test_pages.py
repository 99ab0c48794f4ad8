"""The numbers in CLAIMS.md, NEGATIVE.md and docs/ are those of the records."""

import json
import re

import pytest

from jaxkv.evals.lib import claim, claims, figures, gallery, record


def test_claims_md_is_current():
    assert claims.PAGE.read_text("utf-8") == claims.page(), "run python -m jaxkv.evals.lib.claims"


def test_the_page_of_pictures_shows_all_with_titles():
    page = (record.ROOT / "docs/pictures.md").read_text("utf-8")
    shown = re.findall(r"!\[[^\]]+\]\(\.\./evals/results/(\S+)\.png\)", page)
    assert sorted(shown) == sorted(path.stem for path in record.RESULTS.glob("*.png"))
    assert set(gallery.TITLES) <= set(shown) & set(figures.FIGURES)
    assert {name for name in figures.FIGURES if name in shown} == set(gallery.TITLES)


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_the_numbers_of_a_page_are_current(page):
    text = page.read_text("utf-8")
    assert figures.MARK.search(text) or figures.TABLE.search(text)
    assert figures.fill(text) == text, "run python -m jaxkv.evals.lib.figures"


def test_no_cell_of_a_table_has_a_bar():
    """A bar in a text would start another column."""
    rows = [line.replace(claims.BAR, "") for line in claims.page().splitlines()]
    rows = [line for line in rows if line.startswith("| ")]
    assert rows and all(line.count("|") in (4, 6) for line in rows)


def test_a_number_is_filled_in(tmp_path):
    results = {"results": {"table": [{"times": {"median": 21.456}}]}}
    (tmp_path / "trial.json").write_text(json.dumps(results))
    text = "It is <!--=trial table/0/times/median .1f-->2.0<!--/--> times as fast."
    done = figures.fill(text, tmp_path)
    assert done == "It is <!--=trial table/0/times/median .1f-->21.5<!--/--> times as fast."
    assert figures.fill(done, tmp_path) == done


ABOUT = {
    "command": "python -m jaxkv.evals.streaming.endless",
    "date": "2026-01-01T00:00:00",
    "commit": "0123456789",
    "dirty": False,
    "device": "cpu: cpu",
    "cpu": {"cores": 2, "model": "a CPU", "load": 0.1},
}


@pytest.mark.parametrize(
    "change, tokens, verdict",
    [(0.004, 4_000_000, claim.HOLDS), (0.004, 400_000, claim.PART), (0.006, 4_000_000, claim.NOT)],
)
def test_a_verdict_depends_on_the_numbers(tmp_path, change, tokens, verdict):
    summary = {
        "worst_change": change,
        "worst_change_wrapped": 0.0,
        "not_finite": 0,
        "resident_bytes": {"growth": 0},
    }
    results = {"policy": "p", "tokens": tokens, "block": 1, "endless": [], "summary": summary}
    results["bars"] = [{"bar": "x", "value": 2.0, "ask": "<= 1", "met": False}]
    (tmp_path / "endless.json").write_text(json.dumps(ABOUT | {"results": results}))
    lines = claims.page(tmp_path).splitlines()
    (line,) = [line for line in lines if line.startswith("| Stable") and "endless.json" in line]
    assert line.endswith(f"| {verdict} | [endless](results/endless.json) |")
    assert "| x | 2 | <= 1 | **no** | [endless](results/endless.json) |" in lines
    assert any("streaming.endless`; 2026-01-01, commit 0123456" in line for line in lines)


def test_without_records_every_verdict_is_open(tmp_path):
    rows = [line for line in claims.page(tmp_path).splitlines() if line.startswith("| ")]
    assert all(
        claim.OPEN in row for row in rows if not row.startswith(("| claim", "| bar", "| --"))
    )
