"""CLAIMS.md, BARS.md, the list of records and the tables of pages are those of the records."""

import re

import pytest

from jaxkv.evals.lib import claims, figures, record, table
from jaxkv.evals.lib.experiments import TABLES


@pytest.mark.parametrize("page, text", claims.pages().items(), ids=lambda x: getattr(x, "name", ""))
def test_a_page_of_claims_is_current(page, text):
    assert page.read_text("utf-8") == text, "run python -m jaxkv.evals.lib.claims"


def test_the_page_of_pictures_shows_all_with_titles():
    page = (record.ROOT / "docs/pictures.md").read_text("utf-8")
    shown = re.findall(r"!\[[^\]]+\]\(\.\./evals/results/(\S+)\.png\)", page)
    assert sorted(shown) == sorted(path.stem for path in record.RESULTS.glob("*.png"))
    measured = {
        name
        for name, picture in figures.FIGURES.items()
        if (record.RESULTS / f"{picture.record}.json").exists()
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
