"""Decoding of UTF-8, errors of reading files, and atomic writes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from jaxkv.errors import UserError


def decode(raw: bytes, name: str, begin: int = 0) -> str:
    """Decode UTF-8.

    name: the source, for the error message. begin: the position of the first byte in it. Raises
    UserError for bytes that are not UTF-8.
    """
    try:
        return raw.decode("utf-8" if begin else "utf-8-sig")  # drops a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 (byte {begin + error.start}); convert it, for instance with iconv"
        ) from None


@contextlib.contextmanager
def reading(path: str | os.PathLike = "the file") -> Iterator[None]:
    """Turn errors of the file system into UserErrors; also a decorator of functions that read.

    path: named where an error does not name its file.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read {error.filename or path}: {error.strerror or error}; check that it is a "
            "file that you may read"
        ) from None


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for a pipe or a device, which might block."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    file = open(path, "rb", opener=opener)  # noqa: SIM115, for the caller to close
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def stats(folder: Path, pattern: str) -> dict[Path, os.stat_result]:
    """The status of every matching file, without those that other processes delete meanwhile."""
    states = {}
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            states[path] = path.stat()
    return states


def write(files: Mapping[Path, bytes]) -> None:
    """Write all files or none: they get their names once the last one is complete."""
    with contextlib.ExitStack() as unfinished:
        for path, content in files.items():
            file = unfinished.enter_context(atomic_file(path))
            file.write(content)
            file.flush()  # a full disk fails here, before any file has its name


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which gets its name only after a clean exit, once it is on the disk.

    After an exception an existing file of that name is unchanged. A symbolic link stays, and its
    target is written. private: only its user can access the file. Raises OSError for a name that is
    something else than a file, such as a device, which would be replaced.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        if not private:  # as a temporary file is
            os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
