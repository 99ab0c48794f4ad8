"""The numbers in CLAIMS.md, NEGATIVE.md and docs/ are those of the records."""

import json
import re

import pytest

from jaxkv.evals.lib import claim, claims, figures, gallery, record
from jaxkv.evals.lib.measured_on import measured_on


def test_claims_md_is_current():
    assert claims.PAGE.read_text("utf-8") == claims.page(), "run python -m jaxkv.evals.lib.claims"


def test_the_page_of_pictures_shows_all_with_titles():
    page = (record.ROOT / "docs/pictures.md").read_text("utf-8")
    shown = re.findall(r"!\[[^\]]+\]\(\.\./evals/results/(\S+)\.png\)", page)
    assert sorted(shown) == sorted(path.stem for path in record.RESULTS.glob("*.png"))
    assert set(gallery.TITLES) == set(figures.FIGURES)
    measured = {
        name
        for name, (of, _) in figures.FIGURES.items()
        if (record.RESULTS / f"{of}.json").exists()
    }
    assert set(shown) & set(figures.FIGURES) == measured


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_the_numbers_of_a_page_are_current(page):
    text = page.read_text("utf-8")
    assert figures.MARK.search(text) or figures.TABLE.search(text)
    assert figures.fill(text) == text, "run python -m jaxkv.evals.lib.figures"


def test_every_page_with_marks_is_filled():
    folders = (record.ROOT, record.ROOT / "evals", record.ROOT / "docs")
    pages = [page for folder in folders[:2] for page in folder.glob("*.md")]
    pages += folders[2].rglob("*.md")
    marked = {page for page in pages if figures.MARK.search(page.read_text("utf-8"))}
    assert marked and not marked - set(figures.PAGES)


def test_no_cell_of_a_table_has_a_bar():
    """A bar in a text would start another column."""
    rows = [line.replace(claims.BAR, "") for line in claims.page().splitlines()]
    rows = [line for line in rows if line.startswith("| ")]
    assert rows and all(line.count("|") in (4, 7) for line in rows)


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
    "versions": {"jax": "0.12.0"},
    "data": {"models/stories260K/model.safetensors": "0"},
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
        "resident_bytes": {"min": 2**30, "max": 2**30 + 2**21},
        "state_bytes": [2**20],
    }
    results = {"policy": "p", "tokens": tokens, "block": 1, "endless": [], "summary": summary}
    results["bars"] = [{"bar": "x", "value": 2.0, "ask": "<= 1", "met": False}]
    (tmp_path / "endless.json").write_text(json.dumps(ABOUT | {"results": results}))
    lines = claims.page(tmp_path).splitlines()
    (line,) = [line for line in lines if line.startswith("| Stable") and "endless.json" in line]
    assert line.endswith(f"| {verdict} | [endless](results/endless.json) |")
    assert "| stories260K |" in line and "has 1.0 MiB in every block" in line
    assert "varies by 2.0 MiB" in line
    bar = "| x | stories260K | 2 | <= 1 | **no** | [endless](results/endless.json) |"
    assert bar in lines
    (made,) = [line for line in lines if "streaming.endless`; 2026-01-01" in line]
    assert "commit 0123456, jax 0.12.0, 2 cores" in made


def test_every_record_names_its_model_and_whether_it_read_one_novel():
    names = [name for name in claims.MODULES if (record.RESULTS / f"{name}.json").exists()]
    found = {name: measured_on(name, record.read(name)) for name in names}
    assert found["tree_slots"] == found["peers"] == "SmolLM2-135M"
    assert found["quantised_weights"] == found["cache_int8"] == "SmolLM2-135M, one novel"
    assert found["serving"] == found["prefix_engine"] == "default model"
    with pytest.raises(ValueError, match="new names no file of a model"):
        measured_on("new", {"data": {}})


def test_records_of_a_jax_that_miscompiles_are_named(tmp_path):
    about = {"versions": {"jax": claims.MISCOMPILES}}
    (line, _) = claims.miscompiled({"endless": about, "peers": ABOUT})
    assert "[endless](results/endless.json)." in line and "peers" not in line
    assert claims.miscompiled({"peers": ABOUT}) == []


def test_without_records_every_verdict_is_open(tmp_path):
    rows = [line for line in claims.page(tmp_path).splitlines() if line.startswith("| ")]
    assert all(
        claim.OPEN in row for row in rows if not row.startswith(("| claim", "| bar", "| --"))
    )
