"""The header of a GGUF file: its metadata and the places of its tensors.

The `gguf` package has a reader, which makes several arrays per list entry: 6 s and 150 MB for a
vocabulary of 49,152 tokens, against 0.1 s here. It also keeps the whole file mapped, and pages that
were read count as resident memory. Layout: the GGUF specification, version 3, in the repository of
ggml.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, prod
from pathlib import Path
from types import GenericAlias
from typing import Any, get_args

import numpy as np

from jaxkv.errors import UserError, first_few
from jaxkv.files import reading
from jaxkv.models.loading.hf.weights import LFS
from jaxkv.models.loading.tensors import Tensor, corrupt

MAGIC, VERSION = b"GGUF", 3
ALIGNMENT = 32  # bytes, unless the metadata says otherwise
MAX_NAME = 64  # characters of the name of a tensor; the specification allows as many bytes
MAX_AXES = 8  # ggml has four; more means a damaged file
# Types of metadata values, by number; 8 is a string and 9 a list.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, LIST = 8, 9
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, eq=False)
class Header:
    """The metadata and the tensors of a model, of all its files. path: the file that was named."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def get(self, key: str, kind: type | GenericAlias, default: Any = None) -> Any:
        """The value of a field, or the default. kind: a type, or list[TYPE].

        Raises UserError for another type, and for floats that are not finite.
        """
        value = self.fields.get(key)
        return default if value is None else self.checked(key, value, kind)

    def need(self, key: str, kind: type | GenericAlias) -> Any:
        """The value of a field, as `get`; raises UserError where it is missing or empty."""
        if self.fields.get(key) in (None, "", []):
            raise UserError(f"{self.path}: missing field {key}; download it again")
        return self.get(key, kind)

    def checked(self, key: str, value: Any, kind: type | GenericAlias) -> Any:
        """A value, after the checks of `get`."""
        entries = value if type(value) is list else [value]
        (item,) = get_args(kind) or (kind,)
        # The format gives one type to all entries of a list.
        if (entries is value) == (item is kind) or any(type(e) is not item for e in entries[:1]):
            name = kind.__name__ if item is kind else f"list of {item.__name__}"
            raise corrupt(self.path, f"{key} must be of type {name}, got {value!r:.60}")
        if item is float and not all(map(isfinite, entries)):
            got = next(entry for entry in entries if not isfinite(entry))
            raise corrupt(self.path, f"{key} must be finite, got {got}")
        return value


def read_header(path: Path) -> Header:
    """The header of a model; of a split model those of all files, named by any one of them.

    Raises UserError for a file that is truncated, corrupt, not GGUF, or of another version.
    """
    files = _split_files(path)
    fields, tensors = _read_file(files[0])
    header = Header(path, fields, tensors)
    count = header.get("split.count", int, len(files))
    if count not in (0, len(files)):
        raise UserError(
            f"{files[0]} is one of {count} split files, but its name does not end in "
            f"-00001-of-{count:05}.gguf; give the files the names that they were published with"
        )
    for file in files[1:]:
        for name, tensor in _read_file(file)[1].items():
            if name in tensors:
                raise corrupt(file, f"{name} is in {tensors[name].file.name} too")
            tensors[name] = tensor
    return header


def _split_files(path: Path) -> list[Path]:
    """The files of a split model in order; a single file by itself."""
    match = SPLIT.fullmatch(path.name)
    if not match:
        return [path]
    start, count = match[1], int(match[3])
    if not 1 <= int(match[2]) <= count:
        raise UserError(
            f"{path}: the number in the name of a split file must be from 1 to their count, got "
            f"{match[2]}-of-{match[3]}; give the files the names that they were published with"
        )
    files = [path.with_name(f"{start}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{path} is one of {count} split files, and {path.parent} lacks {first_few(missing)}; "
            "download all of them into one folder"
        )
    return files


@reading()
def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    size = path.stat().st_size
    if size == 0:
        raise corrupt(path, "it is empty")
    # Mapped, because the size of the header is not known before it is read.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _check_version(path, data)
        return _Cursor(path, data).header()


def _check_version(path: Path, data: mmap.mmap) -> None:
    if data[: len(LFS)] == LFS:
        raise UserError(f"{path} is a Git LFS pointer and not the weights; run git lfs pull")
    if data[:4] != MAGIC:
        raise UserError(
            f"{path} is not a GGUF file: it begins with {data[:4]!r} and not with {MAGIC!r}; "
            "name a GGUF file or the folder of a model"
        )
    if len(data) < 8:
        raise corrupt(path, "it ends within its header")
    (version,) = struct.unpack_from("<I", data, 4)
    if version != VERSION:
        raise UserError(
            f"{path} has GGUF version {version}, and jaxkv reads version {VERSION}, little-endian; "
            "convert the model again with a current llama.cpp"
        )


class _Cursor:
    """Reads the values of a header one after the other."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 8

    def header(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        num_tensors, num_fields = self.number("Q"), self.number("Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self.string()
            fields[key] = self.value(self.number("I"))
        alignment = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise corrupt(self.path, f"general.alignment must be above 0, got {alignment!r}")
        entries = [self.tensor() for _ in range(self.bounded(num_tensors, 1))]
        start = -(-self.at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise corrupt(self.path, f"it has two tensors named {name}")
            if offset % alignment:
                why = f"the offset of {name} must be a multiple of {alignment}, got {offset}"
                raise corrupt(self.path, why)
            tensors[name] = self._placed(name, shape, kind, start + offset)
        in_order = sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.bytes))
        for tensor, following in pairwise(in_order):
            if tensor.start + tensor.bytes > following.start:
                raise corrupt(self.path, f"{tensor.name} and {following.name} overlap")
        return fields, tensors

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Tensor:
        block, block_bytes = layout(kind) or (1, 0)  # the size of unknown types is not known
        if shape[-1:] and shape[-1] % block:
            raise corrupt(
                self.path,
                f"rows of {name} have {shape[-1]} weights, which is no multiple of the "
                f"{block} weights of a {type_name(kind)} block",
            )
        size = prod(shape) // block * block_bytes
        if start + size > len(self.data):
            raise corrupt(
                self.path,
                f"{name} needs {start + size} bytes, the file has {len(self.data)}",
            )
        return Tensor(self.path, name, kind, shape, start, size)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self.string(), self.number("I")
        if len(name) > MAX_NAME or not name.isprintable():
            why = (
                f"a tensor's name must be at most {MAX_NAME} printable characters, got {name!r:.60}"
            )
            raise corrupt(self.path, why)
        if axes > MAX_AXES:
            raise corrupt(self.path, f"{name} has {axes} axes")
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]
        return name, shape, self.number("I"), self.number("Q")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == LIST:
            return self.values()
        if kind not in SCALARS:
            raise corrupt(self.path, f"its metadata has a value of the unknown type {kind}")
        value = self.number(SCALARS[kind])
        # The shortest decimal number: 1e-05 instead of 9.999999747378752e-06.
        return float(str(np.float32(value))) if SCALARS[kind] == "f" else value

    def values(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            return [self.string() for _ in range(self.bounded(count, 8))]
        if kind not in SCALARS:
            raise corrupt(self.path, f"its metadata has a list of the unknown type {kind}")
        form = SCALARS[kind]
        count = self.bounded(count, struct.calcsize(form))
        return list(self._unpack(f"<{count}{form}"))

    def bounded(self, count: int, entry_bytes: int) -> int:
        """A count of entries of at least `entry_bytes` bytes; raises if the file is too short."""
        if count * entry_bytes > len(self.data) - self.at:
            raise corrupt(self.path, "it ends within its header")
        return count

    def number(self, form: str) -> Any:
        return self._unpack("<" + form)[0]

    def string(self) -> str:
        (length,) = self._unpack("<Q")
        raw = self.data[self.at : self.at + self.bounded(length, 1)]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise corrupt(self.path, f"its metadata is not UTF-8: {raw!r:.60}") from None

    def _unpack(self, form: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from(form, self.data, self.at)
        except struct.error:
            raise corrupt(self.path, "it ends within its header") from None
        self.at += struct.calcsize(form)
        return values


def layout(kind: int) -> tuple[int, int] | None:
    """Weights and bytes per block of a ggml type, by number; None for an unknown type."""
    package = gguf_package()
    try:
        return package.GGML_QUANT_SIZES[package.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        return None


def type_name(kind: int) -> str:
    """The name of a ggml type, by number; the number itself for an unknown type."""
    try:
        return gguf_package().GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"


def gguf_package() -> Any:
    """The package `gguf`; raises UserError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError(
            "reading GGUF files needs the package gguf; pip install 'jaxkv[models]'"
        ) from None
    return gguf
