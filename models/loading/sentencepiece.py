"""SentencePiece: a tokenizer.model, or the pieces of a GGUF file written as one.

The `sentencepiece` package encodes the text between added tokens. The tokens themselves are found
before (added_tokens.py), because the formats differ in what is a token and in the space
after it. The messages and field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError
from jaxkv.models.loading.added_tokens import AddedToken, TextPart
from jaxkv.models.loading.token_bytes import SPACE

BPE = 2  # TrainerSpec.ModelType
# SentencePiece.Type; GGUF numbers its token types alike.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)  # matched whole in a text
PIECE, NORMALIZER, ADD_SPACE = 1, 3, 3  # fields
VARINT, LENGTH = 0, 2  # wire types
SIZES = {1: 8, 5: 4}  # bytes of the other wire types


@dataclass(frozen=True)
class SentencePieceCoder:
    """Encodes text without added tokens.

    first: the processor that puts a space before a text. continued: the one that does not. legacy:
    a space is put also after each added token, and before a text that begins with a space.
    """

    first: Any
    continued: Any
    legacy: bool

    def ids(self, parts: Sequence[TextPart], start: bool) -> list[int]:
        """The ids of a text, cut at its added tokens; start: it begins a text."""
        ids: list[int] = []
        for number, part in enumerate(parts):
            if isinstance(part, AddedToken):
                ids.append(part.id)
                continue
            spaced = (self.legacy or not part.startswith((" ", SPACE))) if start else False
            if number:
                spaced = self.legacy
            ids += (self.first if spaced else self.continued).encode(part)
        return ids


def coder(
    path: Path, model: bytes, added: Sequence[AddedToken], adds_space: bool, legacy: bool
) -> SentencePieceCoder:
    """Raises UserError for what is no SentencePiece model; path: for error messages."""
    # The package itself would find user-defined pieces in a text, and control pieces never.
    hidden = as_control(model, {token.id for token in added})
    # The last value of a field counts.
    no_space = hidden + _message(NORMALIZER, _number(ADD_SPACE, 0))
    continued = processor(path, no_space)
    return SentencePieceCoder(
        processor(path, hidden) if adds_space else continued, continued, legacy
    )


def processor(path: Path, model: bytes) -> Any:
    """The `sentencepiece` package's processor of a serialised model; path: for error messages."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise UserError(
            f"reading {path} needs the package sentencepiece (pip install sentencepiece)"
        ) from None
    try:
        backend = SentencePieceProcessor(model_proto=model)
        backend.vocab_size()
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{path} is corrupt: {str(error).splitlines()[0]}; download it again"
        ) from None
    return backend


def added_pieces(model: bytes) -> list[AddedToken]:
    """The pieces that are matched whole in a text. Unknown pieces are silent, as control pieces."""
    pieces = (content for field, content, _ in _fields(model) if field == PIECE)
    types = [_type(content) for content in pieces]
    return [
        AddedToken(text, i, special=kind != USER_DEFINED)
        for i, (text, kind) in enumerate(types)
        if kind in ADDED
    ]


def as_control(model: bytes, ids: Collection[int]) -> bytes:
    """The model with these pieces as control pieces; unknown ones stay, because it needs one."""
    out, number = [], 0
    for field, content, raw in _fields(model):
        if field == PIECE:
            if number in ids and _type(content)[1] != UNKNOWN:
                raw = _message(PIECE, content + _number(3, CONTROL))
            number += 1
        out.append(raw)
    return b"".join(out)


def serialise(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    add_space: bool,
    collapse_spaces: bool = False,
) -> bytes:
    """The bytes of a tokenizer.model of the type BPE.

    add_space: put a space before a text. collapse_spaces: encode repeated spaces as one, and none
    around a text.
    """
    model = b"".join(
        _message(PIECE, _message(1, piece.encode()) + _float(2, score) + _number(3, kind))
        for piece, score, kind in zip(pieces, scores, types, strict=True)
    )
    unknown = types.index(UNKNOWN) if UNKNOWN in types else 0
    # Fields 40 to 43 are the ids of unknown, BOS, EOS and padding; only the first must exist.
    ids = _number(40, unknown) + b"".join(_number(field, -1) for field in (41, 42, 43))
    trainer = _number(3, BPE) + _number(35, int(BYTE in types)) + ids
    normalizer = (
        _message(1, b"identity")
        + _number(ADD_SPACE, int(add_space))
        + _number(4, int(collapse_spaces))
        + _number(5, 1)  # write spaces as U+2581
    )
    return model + _message(2, trainer) + _message(NORMALIZER, normalizer)


def adds_space(model: bytes) -> bool:
    """Whether a space is put before a text."""
    values = [
        value
        for field, content, _ in _fields(model)
        if field == NORMALIZER
        for name, value, _ in _fields(content)
        if name == ADD_SPACE
    ]
    return bool(values[-1]) if values else True


def _type(piece: bytes) -> tuple[str, int]:
    fields = {field: value for field, value, _ in _fields(piece)}
    return fields.get(1, b"").decode(), fields.get(3, NORMAL)


def _fields(message: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """Number, value and bytes of each field; the value of a message or text is its bytes."""
    at = 0
    while at < len(message):
        start = at
        tag, at = _read_varint(message, at)
        field, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = _read_varint(message, at)
        else:
            size, at = _read_varint(message, at) if wire == LENGTH else (SIZES[wire], at)
            value, at = message[at : at + size], at + size
        yield field, value, message[start:at]


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = message[at], at + 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    value %= 1 << 64
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | LENGTH) + _varint(len(content)) + content


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
