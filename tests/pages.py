"""The code of the pages, for the tests that run it."""

from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]


@cache
def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    tokens = MarkdownIt("commonmark").parse((ROOT / page).read_text("utf-8"))
    return [t.content for t in tokens if t.type == "fence" and t.info.strip() == language]


def run_block(page: str, word: str, names: dict) -> None:
    """Execute the Python block of a page that contains a word.

    Without the __future__ imports of the caller, which would change its dataclasses.
    """
    (block,) = (block for block in blocks(page, "python") if word in block)
    exec(compile(block, page, "exec", dont_inherit=True), names)
