"""Text read, and files that appear under their names when they are complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from jaxkv.errors import UserError


def decode(raw: bytes, name: str) -> str:
    """UTF-8 as text; raises UserError for what is none. name: as an error names it."""
    try:
        return raw.decode("utf-8-sig")  # an editor's mark in front is no text
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 (byte {error.start}); convert it, for instance with iconv"
        ) from None


def write(files: Mapping[Path, bytes]) -> None:
    """Write all of these or none: they take their names when the last one is complete."""
    with contextlib.ExitStack() as unfinished:
        for path, content in files.items():
            file = unfinished.enter_context(whole_file(path))
            file.write(content)
            file.flush()  # a full disk is met here, before any of them has its name


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write to; it takes its name at the end, on the disk, where nothing went wrong."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        os.chmod(name, 0o666 & ~_umask())  # a temporary file is for its owner alone
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
