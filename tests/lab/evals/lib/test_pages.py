"""CLAIMS.md, BARS.md, the list of records and the tables of pages are those of the records."""

import json
import re

import pytest

from jaxkv.evals.lib import claims, figures, gallery, record, table, verdict
from jaxkv.evals.lib.experiments import TABLES
from jaxkv.evals.lib.measured_on import measured_on


@pytest.mark.parametrize("page, text", claims.pages().items(), ids=lambda x: getattr(x, "name", ""))
def test_a_page_of_claims_is_current(page, text):
    assert page.read_text("utf-8") == text, "run python -m jaxkv.evals.lib.claims"


def test_the_page_of_pictures_shows_all_with_titles():
    page = (record.ROOT / "docs/pictures.md").read_text("utf-8")
    shown = re.findall(r"!\[[^\]]+\]\(\.\./evals/results/(\S+)\.png\)", page)
    assert sorted(shown) == sorted(path.stem for path in record.RESULTS.glob("*.png"))
    assert set(gallery.TITLES) == set(figures.FIGURES)
    measured = {
        name
        for name, (record_name, _) in figures.FIGURES.items()
        if (record.RESULTS / f"{record_name}.json").exists()
    }
    assert set(shown) & set(figures.FIGURES) == measured


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_current(page):
    text = page.read_text("utf-8")
    assert figures.fill(text) == text, "run python -m jaxkv.evals.lib.figures"


def test_every_table_is_on_a_page():
    texts = [page.read_text("utf-8") for page in figures.pages()]
    names = {name for text in texts for _, name, _ in figures.TABLE.findall(text)}
    assert names == set(TABLES)


def test_no_cell_of_a_table_has_a_bar():
    """A bar in a text would start another column."""
    pages = [text.replace(table.BAR, "") for text in claims.pages().values()]
    rows = [line for text in pages for line in text.splitlines()]
    rows = [line for line in rows if line.startswith("| ")]
    assert rows and all(line.count("|") in (4, 7) for line in rows)


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


def test_a_record_has_its_bars_and_its_command(tmp_path):
    results = {"bars": [{"bar": "x", "value": 2.0, "ask": "<= 1", "met": False}]}
    summary = {"worst_change": 0.004, "worst_change_wrapped": 0.006}
    results |= {"summary": summary | {"state_bytes": [4], "not_finite": 0}}
    (tmp_path / "endless.json").write_text(json.dumps(ABOUT | {"results": results}))
    pages = claims.pages(tmp_path)
    assert f"| stories260K | 0.4 %; 0.6 % | {verdict.PART} |" in pages[claims.CLAIMS]
    bar = "| x | stories260K | 2 | <= 1 | **no** | [endless](results/endless.json) |"
    assert bar in pages[claims.BARS].splitlines()
    (record_line,) = [
        line for line in pages[claims.RECORDS].splitlines() if line.startswith("- [endless]")
    ]
    assert "streaming.endless`; 2026-01-01, commit 0123456, jax 0.12.0, 2 cores" in record_line


def test_every_record_names_its_model_and_whether_it_read_one_novel():
    names = [name for name in claims.MODULES if (record.RESULTS / f"{name}.json").exists()]
    models = {name: measured_on(name, record.read(name)) for name in names}
    assert models["tree_slots"] == models["peers"] == "SmolLM2-135M"
    assert models["quantised_weights"] == models["cache_int8"] == "SmolLM2-135M, one novel"
    assert models["serving"] == models["prefix_engine"] == "default model"
    with pytest.raises(ValueError, match="new names no file of a model"):
        measured_on("new", {"data": {}})


def test_records_of_a_jax_that_miscompiles_are_named(tmp_path):
    about = {"versions": {"jax": claims.MISCOMPILES}}
    (line, _) = claims.miscompiled({"endless": about, "peers": ABOUT})
    assert "[endless](endless.json)." in line and "peers" not in line
    assert claims.miscompiled({"peers": ABOUT}) == []


def test_without_records_every_verdict_is_open(tmp_path):
    lines = claims.pages(tmp_path)[claims.CLAIMS].splitlines()
    rows = [line for line in lines if line.startswith("| ") and "| --" not in line]
    assert all(verdict.OPEN in row for row in rows if not row.startswith("| claim"))
