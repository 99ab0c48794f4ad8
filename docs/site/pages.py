"""A hook of mkdocs: adds the pages of the repository, and the files that they link to."""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)  # marks of figures in the text
LINK = re.compile(r"\]\(([^)#\s]+)")


def on_config(config: Any) -> Any:
    """Take the address of the repository from pyproject.toml.

    It is a link in the footer: for `repo_url` every page would ask GitHub for its stars.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    link = {"icon": "fontawesome/brands/git-alt", "link": project["urls"]["Repository"]}
    config.extra["social"] = [link | {"name": "Repository"}]
    config.watch += [str(ROOT / name) for name in pages(config.nav)]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add every page of `nav`, and each picture, record, notebook or text that a page links to."""
    names = dict.fromkeys(pages(config.nav))
    for page in list(names):
        text = (ROOT / page).read_text("utf-8")
        for link in LINK.findall(text):
            name = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
            if (ROOT / name).is_file():
                names[name] = None
    for name in names:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Remove the marks, which Python-Markdown would take for blocks of HTML."""
    return COMMENT.sub("", markdown)


def pages(nav: Any) -> Iterator[str]:
    """The paths of the pages in `nav`."""
    if isinstance(nav, str):
        yield nav
        return
    for item in nav.values() if isinstance(nav, dict) else nav:
        yield from pages(item)
