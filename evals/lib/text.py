"""Texts to read: files, and books."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv.cli.files import read_text
from jaxkv.errors import UserError

if TYPE_CHECKING:
    from jaxkv.models.loading.llm import Llm

HELD_BACK = ("valid", "test")  # splits of books that the default model has not seen


def tokens_of(
    llm: Llm, texts: Path, count: int, splits: Sequence[str] = ("train",)
) -> tuple[list[int], list[Path]]:
    """The first `count` tokens of a file, or of a folder's books as one text; all, if fewer."""
    files, text, ids = [], [], []
    for book in [texts] if texts.is_file() else books(texts, splits):
        files.append(book)
        text.append(read_text(str(book), "text"))
        # A token is rarely shorter than a byte, so encode only once there are enough bytes.
        if sum(map(len, text)) >= count:
            ids = llm.tokenizer.encode("\n\n".join(text))
            if len(ids) >= count:
                break
    return (ids or llm.tokenizer.encode("\n\n".join(text)))[:count], files


def beginnings(llm: Llm, texts: Sequence[Path], count: int) -> dict[str, list[int]]:
    """The first `count` tokens of each text, or all, by its name."""
    return {path.stem: tokens_of(llm, path, count)[0] for path in texts}


def first_tokens(llm: Llm, texts: Sequence[Path], count: int) -> dict[str, list[int]]:
    """The first `count` tokens of each text, by its name.

    Raises UserError if a text has fewer.
    """
    by_name = beginnings(llm, texts, count)
    short = [name for name, ids in by_name.items() if len(ids) < count]
    if short:
        raise UserError(
            f"--texts must have {count} tokens, {', '.join(short)} has fewer; give others"
        )
    return by_name


def stretches_of(
    llm: Llm, texts: Sequence[Path], count: int, length: int
) -> tuple[list[int], list[Path]]:
    """The tokens of `count` stretches of `length`, one after the other, and their files.

    Each text gives as many, from its beginning; a folder is one text, its books that the default
    model has not seen. Raises UserError if the texts cannot give as many, or are too short.
    """
    of_each, rest = divmod(count, len(texts))
    if rest:
        raise UserError(
            f"every text gives as many stretches, got {count} stretches of {len(texts)} texts; "
            f"give --stretches {count + len(texts) - rest}"
        )
    ids: list[int] = []
    files: list[Path] = []
    for text in texts:
        if not text.exists():
            raise UserError(
                f"a text must exist, got {text}; name a text file, or a folder of books"
            )
        text_ids, text_files = tokens_of(llm, text, of_each * length, HELD_BACK)
        if len(text_ids) < of_each * length:
            raise UserError(
                f"{of_each} x {length} tokens of each text are needed, {text} has {len(text_ids)}; "
                "give fewer --stretches or --tokens"
            )
        ids, files = [*ids, *text_ids], [*files, *text_files]
    return ids, files


def books(folder: Path, splits: Sequence[str]) -> Iterator[Path]:
    """The books of some splits, those of manifest_more.json last.

    In a folder without manifest.json, every text.
    """
    if not (folder / "manifest.json").exists():
        yield from sorted(folder.glob("*.txt"))
    for name in ("manifest.json", "manifest_more.json"):
        if (folder / name).exists():
            listed = json.loads((folder / name).read_text("utf-8"))["books"]
            yield from (folder / book["file"] for book in listed if book["split"] in splits)
