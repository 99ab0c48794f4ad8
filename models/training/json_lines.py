"""Documents of JSON lines: one object a line, whose field is a text."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxkv.errors import UserError, first_few


def documents(path: Path, column: str, start: int, stop: int | None) -> Iterator[str]:
    """The texts of the lines that begin in bytes `start` to `stop` of a file.

    stop: None for all lines of a gzip file. Empty lines, and lines whose text is null, are left
    out. Raises UserError with the number of a line that is not an object with a text.
    """
    try:
        with gzip.open(path) if stop is None else path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # the rest of a line that begins before
            begin = file.tell()
            for number, line in enumerate(_lines(file, stop)):
                if not line.isspace():
                    try:
                        text = _text(line, column)
                    except ValueError as error:
                        before = _line_ends(path, begin)
                        raise UserError(f"{path}, line {before + number + 1}: {error}") from None
                    if text is not None:
                        yield text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file: {error}; download it again") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check it") from None


def _lines(file: BinaryIO, stop: int | None) -> Iterator[bytes]:
    at = file.tell()
    while (stop is None or at < stop) and (line := file.readline()):
        yield line
        at += len(line)


def _text(line: bytes, column: str) -> str | None:
    """The text of a line. Raises ValueError with what is wrong with it, and the remedy."""
    remedy = "correct the line, or remove it"
    try:
        fields: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start} of the line); {remedy}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg}, character {error.pos}); {remedy}") from None
    except RecursionError:
        raise ValueError(f"JSON that is nested too deeply; {remedy}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"must be an object, got {type(fields).__name__}; {remedy}")
    if column not in fields:
        names = first_few(map(repr, fields)) or "none"
        raise ValueError(f"no field {column!r}, its fields are {names}; name one with --column")
    text = fields[column]
    if not isinstance(text, str | None):
        raise ValueError(
            f"field {column!r} must be a string, got {type(text).__name__}; name another with "
            "--column"
        )
    try:
        _ = text and text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a lone surrogate at character {error.start}; {remedy}") from None
    return text


def _line_ends(path: Path, stop: int) -> int:
    """The number of line ends in the first `stop` bytes: only an error needs it."""
    count = 0
    with path.open("rb") as file:
        while stop > 0 and (block := file.read(min(stop, 2**20))):
            count += block.count(b"\n")
            stop -= len(block)
    return count
