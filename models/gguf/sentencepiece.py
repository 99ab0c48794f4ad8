"""A SentencePiece model from the pieces of a GGUF file.

The file has the pieces, scores and types of the original tokenizer.model. Written as a model again,
they are read by the `sentencepiece` package itself, so texts are encoded as the original does.
The messages and field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

BPE = 2  # TrainerSpec.ModelType
UNKNOWN, BYTE = 2, 6  # SentencePiece.Type; GGUF numbers its token types alike


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
        _message(1, _message(1, piece.encode()) + _float(2, score) + _number(3, kind))
        for piece, score, kind in zip(pieces, scores, types, strict=True)
    )
    unknown = types.index(UNKNOWN) if UNKNOWN in types else 0
    # Fields 40 to 43 are the ids of unknown, BOS, EOS and padding; only the first must exist.
    ids = _number(40, unknown) + b"".join(_number(field, -1) for field in (41, 42, 43))
    trainer = _number(3, BPE) + _number(35, int(BYTE in types)) + ids
    normalizer = (
        _message(1, b"identity")
        + _number(3, int(add_space))
        + _number(4, int(collapse_spaces))
        + _number(5, 1)  # write spaces as U+2581
    )
    return model + _message(2, trainer) + _message(3, normalizer)


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
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
