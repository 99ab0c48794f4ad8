"""The files that `jaxkv data` reads: their order, their documents, and how they are divided.

    .txt                  the file is one document
    .jsonl, .jsonl.gz     each line is an object; its field `column` is a document
    .parquet              each row is a document, in the column `column`

A part is what one process tokenizes at a time. It consists of sections: bytes of a file, or row
groups of a Parquet file. Sections depend only on the files, never on the number of processes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from jaxkv.errors import UserError, first_few, warn
from jaxkv.files import decode, reading
from jaxkv.models.training import json_lines, parquet
from jaxkv.models.training.data import SPLITS, Split

PART = 2**24  # bytes of a part, about: seconds of one process
BLOCK = 2**18  # bytes or characters that are encoded at a time: larger ones take more memory only
ENDINGS = {
    ".txt": "text", ".jsonl": "lines", ".jsonl.gz": "gzip lines", ".parquet": "parquet",
}  # fmt: skip
# Where a long text may be cut: between a letter or digit and a line end.
_CUT, _LINE_END = re.compile(r"(?<=[^\W_])(?=\r?\n)"), re.compile(rb"\r?\n")
_WINDOW = 2**16  # bytes that are searched for a cut at a time


class TextFile(NamedTuple):
    """An input file. name: within the folder that was given. split: None if each document's own."""

    path: Path
    name: str
    kind: str
    bytes: int
    sha256: str
    split: Split | None


class Section(NamedTuple):
    """Bytes or row groups `start` to `stop` of the `end` in a file. size: bytes of text."""

    file: int
    path: Path
    kind: str
    split: Split | None
    start: int
    stop: int
    end: int
    size: int


class ReadSettings(NamedTuple):
    """How documents are read.

    column: the field or column with the text. remove: a regular expression whose matches are
    removed. share: the fraction of documents in the valid split. cuts: whether the tokens of a text
    do not change where it is cut at line ends (data_tokenizer.can_cut).
    """

    column: str
    remove: str | None
    share: float
    cuts: bool


class Text(NamedTuple):
    """A document, or a piece of one. last: the document ends here."""

    text: str
    split: Split
    last: bool = True


def find(
    texts: Sequence[Path],
    valid: Sequence[Path],
    share: float,
    processes: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[TextFile]:
    """The files of both splits, in a fixed order, with their hashes.

    A file that is named for both splits belongs to the valid one. Without `valid`, the hash of a
    document assigns it to the valid split with probability `share`. report: called with (bytes
    done, all bytes). Raises UserError for a share beyond 0 to 1, a missing or unknown file, an
    empty folder, and a split without documents.
    """
    if not valid and not 0 < share < 1:
        raise UserError(f"--valid-share must be above 0 and below 1, got {share:g}; try 0.02")
    every, validation = files_in(texts), files_in(valid)
    away = {path.resolve() for path in validation}
    train = {path: name for path, name in every.items() if path.resolve() not in away}
    paths = [*train, *validation]
    names = train | validation
    sizes = [path.stat().st_size for path in paths]
    text_files: list[TextFile] = []
    done = 0
    with ThreadPoolExecutor(processes) as threads:  # hashing does not hold Python's lock
        for path, size, digest in zip(paths, sizes, threads.map(_digest, paths), strict=True):
            kind = _kind(path)
            split = ("valid" if path in validation else "train") if valid else None
            if not valid and kind == "text":
                split = split_of(digest, share)
            text_files.append(TextFile(path, names[path], kind, size, digest.hex(), split))
            done += size
            report(done, sum(sizes))
    if None not in {file.split for file in text_files}:
        check_splits({file.split for file in text_files})
    return text_files


def check_splits(splits: set[str]) -> None:
    """Raise UserError unless both splits have a document."""
    for split in SPLITS:
        if split not in splits:
            raise UserError(
                f"the {split} split has no document: files of --valid are not in the train split; "
                "give more texts"
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
            raise UserError(f"no such text: {path}; name a file or a folder")
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


def split_of(digest: bytes, share: float) -> Split:
    """The split that the hash of a document assigns it to, whatever its path."""
    return "valid" if int.from_bytes(digest[:8], "big") < share * 2**64 else "train"


def divide(files: Sequence[TextFile], reading: ReadSettings) -> list[tuple[Section, ...]]:
    """The parts of some files, in order: each has about PART bytes.

    Raises UserError for Parquet files without the column, before any text is read.
    """
    parts: list[list[Section]] = []
    room = 0
    for number, file in enumerate(files):
        for start, stop, end, size in _sections(file, reading):
            if room <= 0:
                parts.append([])
                room = PART
            parts[-1].append(
                Section(number, file.path, file.kind, file.split, start, stop, end, size)
            )
            room -= size
    return [tuple(part) for part in parts]


def _sections(file: TextFile, reading: ReadSettings) -> Iterator[tuple[int, int, int, int]]:
    """Start, stop, end and size of each section of a file."""
    size = file.bytes
    if file.kind == "parquet":
        groups = parquet.row_groups(file.path, reading.column)
        yield from ((n, n + 1, len(groups), group) for n, group in enumerate(groups))
    elif file.kind == "lines" or (file.kind == "text" and _streams(reading)):
        for start in range(0, max(size, 1), PART):
            stop = min(start + PART, size)
            yield start, stop, size, stop - start
    else:
        yield 0, size, size, size


def _streams(reading: ReadSettings) -> bool:
    """Whether a text file is read in blocks; not with a pattern, which may match across a cut."""
    return reading.cuts and reading.remove is None


def read(section: Section, reading: ReadSettings) -> Iterator[Text]:
    """The documents of a section, long ones in pieces.

    Raises UserError for a text that cannot be read.
    """
    if section.kind == "text" and _streams(reading):
        yield from _blocks(section)
        return
    remove = re.compile(reading.remove) if reading.remove is not None else None
    for text in _documents(section, reading.column):
        split = section.split or split_of(hashlib.sha256(text.encode()).digest(), reading.share)
        text = remove.sub("", text) if remove else text
        *pieces, last = _pieces(text) if reading.cuts else [text]
        yield from (Text(piece, split, last=False) for piece in pieces)
        yield Text(last, split)


def _documents(section: Section, column: str) -> Iterator[str]:
    """The whole documents of a section. A null, which Parquet and JSON allow, is none."""
    path, start, stop = section.path, section.start, section.stop
    if section.kind == "parquet":
        return parquet.documents(path, column, start, stop)
    if section.kind == "text":
        return iter([decode(_bytes(path, 0, section.end), str(path))])
    return json_lines.documents(path, column, start, None if "gzip" in section.kind else stop)


def _pieces(text: str) -> list[str]:
    """A long text in pieces, cut where no token crosses."""
    pieces, start = [], 0
    while cut := _CUT.search(text, start + BLOCK):
        pieces.append(text[start : cut.start()])
        start = cut.start()
    return [*pieces, text[start:]]


def _blocks(section: Section) -> Iterator[Text]:
    """The text from the first cut of a section to the first cut after it, in blocks."""
    path, end = section.path, section.end
    at, stop = _next_cut(path, section.start, end), _next_cut(path, section.stop, end)
    while at < stop:
        to = min(_next_cut(path, at + BLOCK, end), stop)
        text = decode(_bytes(path, at, to), str(path), at)
        yield Text(text, section.split, last=False)
        at = to
    if section.stop == end:
        yield Text("", section.split)


def _next_cut(path: Path, first: int, end: int) -> int:
    """The first byte from `first` on where a text file may be cut."""
    at = first
    while 0 < at < end:
        begin = max(at - 5, 0)  # the longest character before a cut, and a carriage return after it
        window = _bytes(path, begin, begin + _WINDOW)
        for line_end in _LINE_END.finditer(window):
            cut = line_end.start()
            before = window[max(cut - 4, 0) : cut].decode("utf-8", "ignore")
            if begin + cut >= first and before[-1:].isalnum():
                return begin + cut
        if begin + len(window) <= at:
            break  # the file has become shorter
        at = begin + len(window)
    return min(max(at, 0), end)


def _bytes(path: Path, start: int, stop: int) -> bytes:
    with reading(path), path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
