"""The texts that `jaxkv data` reads: their order, their splits and their documents.

.txt                  the file is one document
.jsonl, .jsonl.gz     each line is an object; its field `column` is a document
.parquet              each row is a document, in the column `column`
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.errors import UserError, first_few, warn
from jaxkv.files import decode, reading
from jaxkv.models.training.data import SPLITS, Split

BLOCK = 2**16  # bytes of a long text that are tokenized at a time, about
VALID_SHARE, COLUMN = 0.02, "text"  # the defaults of --valid-share and --column
ROWS = 64  # rows of a Parquet file that are decoded at a time
ENDINGS = {
    ".txt": "text", ".jsonl": "lines", ".jsonl.gz": "gzip lines", ".parquet": "parquet",
}  # fmt: skip
CUT = re.compile(r"(?<=[^\W_])(?=\r?\n)")  # between a letter or digit and a line end


class TextFile(NamedTuple):
    """An input file. name: within the folder that was given. split: None if each document's own."""

    path: Path
    name: str
    kind: str
    bytes: int
    sha256: str
    split: Split | None


class ReadSettings(NamedTuple):
    """How documents are read.

    column: the field or column with the text. remove: a regular expression whose matches are
    removed. valid_share: the fraction of documents in the valid split. cuts: whether a text may be
    tokenized in pieces cut at line ends (corpus.can_cut).
    """

    column: str
    remove: str | None
    valid_share: float
    cuts: bool


class Text(NamedTuple):
    """A document, or a piece of one.

    last: the document ends here. bytes_read: bytes of the file that were read until here.
    """

    text: str
    split: Split
    last: bool
    bytes_read: int


def find(
    texts: Sequence[Path],
    valid: Sequence[Path],
    valid_share: float,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[TextFile]:
    """The files of both splits, in a fixed order, with their hashes.

    A file that is named for both splits belongs to the valid one. Without `valid`, the hash of a
    document assigns it to the valid split with probability `valid_share`. report: called with
    (bytes done, all bytes).
    Raises UserError for a valid_share that is not between 0 and 1, a missing or unknown file, an
    empty folder, and a split without documents.
    """
    if not valid and not 0 < valid_share < 1:
        raise UserError(f"--valid-share must be above 0 and below 1, got {valid_share:g}; try 0.02")
    every, validation = files_in(texts), files_in(valid)
    away = {path.resolve() for path in validation}
    train = {path: name for path, name in every.items() if path.resolve() not in away}
    if not train:
        raise UserError(
            f"--text must name a file that --valid does not, got {first_few(map(str, every))} for "
            "both; give more texts"
        )
    names = train | validation
    sizes = {path: path.stat().st_size for path in names}
    text_files: list[TextFile] = []
    done = 0
    with ThreadPoolExecutor() as threads:  # hashing does not hold Python's lock
        for path, digest in zip(names, threads.map(_digest, names), strict=True):
            kind = _kind(path)
            split = ("valid" if path in validation else "train") if valid else None
            if not valid and kind == "text":
                split = split_of(digest, valid_share)
            file = TextFile(path, names[path], kind, sizes[path], digest.hex(), split)
            text_files.append(file)
            done += file.bytes
            report(done, sum(sizes.values()))
    if None not in {file.split for file in text_files}:
        check_splits({file.split for file in text_files})
    return text_files


def share_of(valid: Sequence[Path], valid_share: float | None) -> float:
    """The share of the valid split. Raises UserError where texts of that split are named too."""
    if valid and valid_share is not None:
        raise UserError(
            f"--valid names the valid split, got --valid-share {valid_share:g} too; leave one out"
        )
    return VALID_SHARE if valid_share is None else valid_share


def column_of(files: Iterable[TextFile], column: str | None) -> str:
    """The field or column with the text. Raises UserError where no file has fields."""
    if column is not None and all(file.kind == "text" for file in files):
        raise UserError(
            f"--column names a field of .jsonl or .parquet files, got {column!r} and only .txt "
            "files; leave it out"
        )
    return COLUMN if column is None else column


def check_splits(splits: set[str]) -> None:
    """Raise UserError unless both splits have a document."""
    for split in SPLITS:
        if split not in splits:
            raise UserError(
                f"both splits must have a document, the {split} split has none; give more texts, "
                "or name those of the valid split with --valid"
            )


def files_in(paths: Iterable[Path]) -> dict[Path, str]:
    """The files that are named, and those in the folders that are named, sorted by name."""
    name_of_file: dict[Path, str] = {}
    endings = ", ".join(ENDINGS)
    for path in map(Path, paths):
        if path.is_dir():
            every = [p for p in sorted(path.rglob("*")) if p.is_file() and p.name[0] != "."]
            inside = [p for p in every if _kind(p)]
            if not inside:
                raise UserError(
                    f"the folder {path} has no file that ends with {endings}; name files, or "
                    "another folder"
                )
            if len(inside) < len(every):
                names = first_few(p.relative_to(path).as_posix() for p in every if not _kind(p))
                warn(f"not read: {names} in {path}, without the ending {endings}")
            name_of_file |= {p: p.relative_to(path).as_posix() for p in inside}
        elif not path.is_file():
            reason = "not a regular file" if path.exists() else "no such text"
            raise UserError(f"{reason}: {path}; name a file or a folder")
        elif not _kind(path):
            raise UserError(f"{path} must end with {endings}; convert it, or rename it")
        else:
            name_of_file[path] = path.name
    return name_of_file


def _kind(path: Path) -> str | None:
    endings = "".join(path.suffixes[-2:]).lower()
    return ENDINGS.get(endings) or ENDINGS.get(path.suffix.lower())


def _digest(path: Path) -> bytes:
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def split_of(digest: bytes, valid_share: float) -> Split:
    """The split that the hash of a document assigns it to, whatever its path."""
    return "valid" if int.from_bytes(digest[:8], "big") < valid_share * 2**64 else "train"


def read(file: TextFile, settings: ReadSettings) -> Iterator[Text]:
    """The documents of a file, long ones in pieces; nulls of Parquet and JSON are skipped.

    Raises UserError for a text that cannot be read.
    """
    # A pattern may match across a cut.
    if file.kind == "text" and settings.cuts and settings.remove is None:
        yield from _pieces(file)
        return
    remove = re.compile(settings.remove) if settings.remove is not None else None
    for text, bytes_read in _documents(file, settings.column):
        digest = hashlib.sha256(text.encode()).digest()
        split = file.split or split_of(digest, settings.valid_share)
        yield Text(remove.sub("", text) if remove else text, split, True, bytes_read)


def _pieces(file: TextFile) -> Iterator[Text]:
    """A text in pieces of about BLOCK bytes, cut where no token crosses."""
    pending: list[str] = []
    at = 0
    with reading(file.path), file.path.open("rb") as stream:
        while raw := stream.read(BLOCK) + stream.readline():
            text = decode(raw, str(file.path), at)
            at += len(raw)
            *_, cut = (0, *(match.start() for match in CUT.finditer(text)))
            if cut:
                yield Text("".join([*pending, text[:cut]]), file.split, False, at)
                pending = []
            pending.append(text[cut:])
    yield Text("".join(pending), file.split, True, at)


def _documents(file: TextFile, column: str) -> Iterator[tuple[str, int]]:
    """The whole documents of a file, with the bytes read until each."""
    if file.kind == "parquet":
        yield from _rows(file, column)
    elif file.kind == "text":
        with reading(file.path):
            raw = file.path.read_bytes()
        yield decode(raw, str(file.path)), file.bytes
    else:
        yield from _lines(file.path, column, "gzip" in file.kind)


def _lines(path: Path, column: str, compressed: bool) -> Iterator[tuple[str, int]]:
    """The texts of JSON lines; raises UserError with the number of a line that has none."""
    with reading(path), path.open("rb") as stream:
        lines = gzip.GzipFile(fileobj=stream) if compressed else stream
        try:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                try:
                    text = _text_of_line(line, column)
                except ValueError as error:
                    raise UserError(f"{path}, line {number}: {error}") from None
                if text is not None:
                    yield text, stream.tell()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            message = f"{path} is not a whole gzip file: {error}; download it again"
            raise UserError(message) from None


def _text_of_line(line: bytes, column: str) -> str | None:
    """The text of a line. Raises ValueError with what is wrong with it, and the remedy."""
    remedy = "correct the line, or remove it"
    try:
        fields: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also for other bytes than UTF-8
        raise ValueError(f"not valid JSON ({error}); {remedy}") from None
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


def _rows(file: TextFile, column: str) -> Iterator[tuple[str, int]]:
    """The texts of a Parquet file, with pyarrow."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file.path) as table:
            if column not in (names := table.schema_arrow.names):
                raise UserError(
                    f"{file.path} has no column {column!r}, its columns are "
                    f"{first_few(map(repr, names))}; name one with --column"
                )
            for group in range(table.num_row_groups):
                done = file.bytes * (group + 1) // table.num_row_groups
                for batch in table.iter_batches(ROWS, [group], [column]):
                    for text in batch.column(0).to_pylist():
                        if not isinstance(text, str | None):
                            raise UserError(
                                f"column {column!r} of {file.path} must hold strings, got "
                                f"{type(text).__name__}; name another with --column"
                            )
                        if text is not None:
                            yield text, done
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        message = f"{file.path} is not a whole Parquet file: {error}; write it again"
        raise UserError(message) from None
