"""The site of the pages, built by mkdocs in strict mode: a broken link is an error."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src"}


class Loads(HTMLParser):
    """The addresses that a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in LOADED and attributes.get("rel") != "canonical" and LOADED[tag] in attributes:
            self.found.append(attributes[LOADED[tag]] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("no mkdocs-material: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", "-d", str(folder)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_on_the_site(site):
    done = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    for page in map(Path, done.stdout.split()):
        place = page.parent if page.name == "README.md" else page.with_suffix("")
        assert (site / place / "index.html").is_file(), f"{page} is not in nav of docs/mkdocs.yml"
    assert "Bounded KV caches" in (site / "index.html").read_text("utf-8")


def test_a_page_loads_nothing_from_the_network_and_shows_no_marks(site):
    pages = list(site.rglob("index.html"))
    assert len(pages) > 10
    for page in pages:
        text, loads = page.read_text("utf-8"), Loads()
        loads.feed(text)
        assert loads.found and not [at for at in loads.found if re.match(r"(\w+:)?//", at)], page
        # For this component a page would ask GitHub for the stars of the repository.
        assert 'data-md-component="source"' not in text, page
        assert "&lt;!--" not in text and "<!--=" not in text, page
