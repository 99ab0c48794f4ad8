"""Converted weights of GGUF files, kept in the user's cache folder and mapped at the next start.

An entry belongs to the file, as it was last changed, to the dtype, the format of the weights and
the code that converts. It has a checksum of each array, which is computed before the array is used:
a damaged entry is converted again. Model folders have no entries, because their weights are not
converted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import files
from jaxkv.models.loading.compilation import cache_folder
from jaxkv.models.loading.tensors import ALIGN

VARIABLE = "JAXKV_WEIGHT_CACHE"
# Of all entries, and never more than half of what would be free without them. A model of 1.2
# billion weights has 4.9 GB in float32.
MAX_BYTES = 16 << 30
STALE = 3600.0  # seconds after which an unfinished entry is removed
MAGIC = b"jaxkv weights 1\n"
PIECE = 8 << 20  # bytes whose checksum one thread computes at a time
# The code that decides the values of converted weights.
SOURCES = (
    "config.py",
    "gguf/config.py",
    "gguf/weights.py",
    "weight_names.py",
    "../network/quantised.py",
    "converted.py",
)

Shapes = Mapping[str, Any]  # by name: a ShapeDtypeStruct, or a quantised matrix of them
Write = Callable[[str, Any], None]


def location(sources: Iterable[Path], dtype: str, weight_format: str) -> Path | None:
    """The entry of these files; None where the user has switched entries off."""
    folder = cache_folder(VARIABLE, "weights")
    if folder is None:
        return None
    stamps = [_stamp(path) for path in sorted(sources)]
    identity = (stamps, dtype, weight_format, _converter(), sys.byteorder)
    return folder / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.weights"


def _stamp(path: Path) -> tuple[object, ...]:
    """What changes if a file does."""
    with files.reading(path):
        state = path.stat()
    changes = state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev
    return str(path.resolve()), *changes


@cache
def _converter() -> str:
    """The version of the code that converts."""
    folder = Path(__file__).parent
    files_of_families = sorted((folder / "families").glob("*.py"))
    sources = b"".join(p.read_bytes() for p in (*(folder / n for n in SOURCES), *files_of_families))
    return hashlib.sha256(version("gguf").encode() + sources).hexdigest()


def read(path: Path, shapes: Shapes) -> dict[str, Any] | None:
    """The arrays of an entry, mapped; None where there is none, or a damaged one."""
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) <= len(MAGIC) + 12:
                return None
            mapped = np.memmap(file, np.uint8, "r")
    except OSError:
        return None
    leaves, tree = jax.tree_util.tree_flatten_with_path(dict(shapes))
    try:
        end = size - len(MAGIC)
        length, checksum = np.frombuffer(mapped[end - 12 : end], "<u8,<u4")[0].tolist()
        footer = mapped[end - 12 - length : end - 12].tobytes()
        if mapped[end:].tobytes() != MAGIC or zlib.crc32(footer) != checksum:
            return None
        places = json.loads(footer)
        arrays = [_array(mapped, places[jax.tree_util.keystr(at)], leaf) for at, leaf in leaves]
    except (ValueError, KeyError, TypeError, IndexError):  # of another shape than expected
        return None
    pieces = [piece for _, _, of_array in places.values() for piece in of_array]

    def is_whole(piece: list[int]) -> bool:
        start, count, checksum = piece
        return zlib.crc32(mapped[start : start + count]) == checksum

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        if not all(threads.map(is_whole, pieces)):
            return None
    with contextlib.suppress(OSError):
        os.utime(path)  # entries used last are kept
    return jax.tree.unflatten(tree, arrays)


def _array(mapped: np.ndarray, place: list[Any], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """An array of an entry; raises ValueError where it is another than expected."""
    dtype, shape, pieces = place
    count, begin = leaf.size * leaf.dtype.itemsize, pieces[0][0]
    ends = [start + length for start, length, _ in pieces]
    if (dtype, tuple(shape)) != (leaf.dtype.name, leaf.shape) or ends[-1] - begin != count:
        raise ValueError("another array")
    if [begin, *ends[:-1]] != [start for start, _, _ in pieces] or begin % ALIGN:
        raise ValueError("gaps")
    return mapped[begin : begin + count].view(leaf.dtype).reshape(leaf.shape)


@contextlib.contextmanager
def writing(path: Path | None, shapes: Shapes) -> Iterator[Write]:
    """Inside, the function writes one weight of an entry; the entry exists after a clean exit.

    path: None writes nothing. shapes: shapes of all weights. Where the entry cannot be written, a
    line on standard error says so, and the rest is ignored.
    """
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(dict(shapes)))
    if path is None or jax.process_index():
        yield lambda name, weight: None
        return
    with contextlib.ExitStack() as stack:
        write: Write | None = None
        with _report_errors(path.parent):
            _make_room(path.parent, size)
            write = stack.enter_context(_writer(path, len(shapes)))

        def store(name: str, weight: Any) -> None:
            nonlocal write
            if write is not None:
                kept, write = write, None
                with _report_errors(path.parent):
                    kept(name, weight)
                    write = kept

        yield store


@contextlib.contextmanager
def _writer(path: Path, count: int) -> Iterator[Write]:
    """A file that gets its name once it has `count` weights. It is not synced: it has checksums."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    places: dict[str, Any] = {}
    stored: set[str] = set()
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:

            def store(name: str, weight: Any) -> None:
                leaves, _ = jax.tree_util.tree_flatten_with_path({name: weight})
                for at, leaf in leaves:
                    host = np.ascontiguousarray(leaf)
                    raw = memoryview(host.reshape(-1).view(np.uint8))
                    begin = file.seek(-(-file.tell() // ALIGN) * ALIGN)
                    pieces = []
                    for first in range(0, len(raw), PIECE):
                        piece = raw[first : first + PIECE]
                        _write(file, piece)
                        pieces.append((begin + first, len(piece), zlib.crc32(piece)))
                    shape = jnp.dtype(host.dtype).name, host.shape
                    places[jax.tree_util.keystr(at)] = (*shape, pieces)
                stored.add(name)
                if len(stored) == count:
                    footer = json.dumps(places).encode()
                    end = np.array([(len(footer), zlib.crc32(footer))], "<u8,<u4").tobytes()
                    _write(file, memoryview(footer + end + MAGIC))

            yield store
        if len(stored) == count:
            with _report_errors(path.parent):
                os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _write(file: Any, raw: memoryview) -> None:
    """Write all bytes: one write of a raw file may take fewer."""
    while raw:
        raw = raw[file.write(raw) :]


def _make_room(folder: Path, size: int) -> None:
    """Remove the least recently used entries until one of `size` bytes fits; or raise OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = files.stats(folder, "*.weights")
    total = sum(state.st_size for state in entries.values())
    bound = min(MAX_BYTES, (total + shutil.disk_usage(folder).free) // 2)
    if size > bound:
        raise OSError(
            0,
            f"{size / 1e6:,.0f} MB are needed, and the folder may have {bound / 1e6:,.0f} MB "
            f"({MAX_BYTES / 1e6:,.0f} MB, or half of the free disk where that is less)",
        )
    for path in sorted(entries, key=lambda path: entries[path].st_mtime_ns):
        if total + size > bound:
            path.unlink(missing_ok=True)
            total -= entries[path].st_size
    for path, state in files.stats(folder, ".*.weights.*").items():  # of processes that were killed
        if time.time() - state.st_mtime > STALE:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _report_errors(folder: Path) -> Iterator[None]:
    """Print errors of writing in one line, once per process, and go on."""
    try:
        yield
    except OSError as error:
        _report(folder, error.strerror or str(error))


@cache
def _reasons(folder: Path) -> list[str]:
    """What this process has said of a folder."""
    return []


def _report(folder: Path, reason: str) -> None:
    if _reasons(folder):
        return
    _reasons(folder).append(reason)
    print(
        f"jaxkv: converted weights are not kept: {folder}: {reason}; each start converts them; set "
        f"{VARIABLE} to another folder, or to off",
        file=sys.stderr,
    )
