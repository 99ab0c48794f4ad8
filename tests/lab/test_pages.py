"""Every page, rendered by a CommonMark parser: links that resolve, and files that exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
MAX_README_WORDS, MAX_SERVING_WORDS = 1200, 2500
NOT_A_FILE = re.compile(r"^jaxkv/step\.py$")  # decisions name files that do not exist
URL = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]


def tracked(*patterns: str) -> list[Path]:
    try:
        run = ["git", "ls-files", "-z", *patterns]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name]


def parse(page: Path):
    return MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))


def anchor(title: str) -> str:
    """The anchor that GitHub gives a title."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    tokens = parse(page)
    titles = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"]
    return {anchor(re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", title)) for title in titles}


def test_links_and_anchors_resolve():
    broken = []
    for page in tracked("*.md"):
        for token in parse(page):
            for child in token.children or []:
                target = child.attrs.get("href") or child.attrs.get("src") or ""
                if not target or target.startswith(("http://", "https://", "mailto:")):
                    continue
                path, _, fragment = str(target).partition("#")
                place = page if not path else (page.parent / path).resolve()
                if not place.exists() or (
                    fragment and place.suffix == ".md" and fragment not in anchors(place)
                ):
                    broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, "\n".join(broken)


def test_readme_is_short():
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    assert len(text.split()) <= MAX_README_WORDS


def test_the_first_page_for_operators_is_short():
    """Details stand in docs/serving_reference.md and deploy/README.md."""
    assert len((ROOT / "docs/serving.md").read_text("utf-8").split()) <= MAX_SERVING_WORDS


def test_the_repository_address_is_in_one_place():
    """Only notebooks repeat the address, to install jaxkv. Other pages assume a clone."""
    pages = {
        path.relative_to(ROOT).as_posix()
        for path in tracked("*.md", "*.py", "*.toml", "*.ipynb", ".ci/*")
        if re.search(r"github(usercontent)?\.com/jaxkv", path.read_text("utf-8"))
    }
    allowed = {"pyproject.toml", "tests/lab/test_pages.py", "tests/lab/colab/test_notebooks.py"}
    assert not [path for path in pages - allowed if not path.startswith("colab/")]
    for path in tracked("colab/*.py"):
        addresses = set(re.findall(r"https://github\.com/[\w-]+/[\w-]+", path.read_text("utf-8")))
        assert {address for address in addresses if "/jaxkv/" in address} <= {URL}, path


@pytest.mark.parametrize(
    "page", ["README.md", "ARCHITECTURE.md", "ACCELERATOR.md", "docs", "evals", "deploy"]
)
def test_named_files_and_modules_exist(page):
    """Paths of .py files from the root, and modules of `python -m`. Capitals are placeholders."""
    missing = []
    for path in tracked(page if page.endswith(".md") else f"{page}/*.md"):
        text = path.read_text("utf-8")
        for name in set(re.findall(r"(?<![\w./*-])(?:\w+/)+\w+\.py\b", text)):
            placeholder = re.search(r"\b(NAME|NN_name)\b", name)
            if not placeholder and not (ROOT / name).is_file() and not NOT_A_FILE.search(name):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
        for name in set(re.findall(r"python -m (jaxkv[\w.]*\w)", text)):
            if not name.endswith("NAME") and find_spec(name) is None:
                missing.append(f"{path.relative_to(ROOT)}: python -m {name}")
    assert not missing, "\n".join(missing)
