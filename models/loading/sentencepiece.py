"""SentencePiece: a tokenizer.model, or the pieces of a GGUF file written as one.

The `sentencepiece` package encodes the text between added tokens. The tokens themselves are found
before (added_tokens.py), because the formats differ in what is a token and in the space
after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError
from jaxkv.models.loading.added_tokens import AddedToken, TextPart

SPACE = "\u2581"  # the mark for a space
# SentencePiece.Type; GGUF numbers its token types alike.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)  # matched whole in a text


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
    proto = _parsed(hidden)
    proto.normalizer_spec.add_dummy_prefix = False
    continued = processor(path, proto.SerializeToString())
    return SentencePieceCoder(
        processor(path, hidden) if adds_space else continued, continued, legacy
    )


def processor(path: Path, model: bytes) -> Any:
    """The `sentencepiece` package's processor of a serialised model; path: for error messages."""
    try:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2  # noqa: F401
    except ImportError:
        raise UserError(
            f"reading {path} needs the packages sentencepiece and protobuf (pip install "
            "sentencepiece protobuf)"
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
    return [
        AddedToken(piece.piece, i, special=piece.type != USER_DEFINED)
        for i, piece in enumerate(_parsed(model).pieces)
        if piece.type in ADDED
    ]


def as_control(model: bytes, ids: Collection[int]) -> bytes:
    """The model with these pieces as control pieces; unknown ones stay, because it needs one."""
    proto = _parsed(model)
    for i, piece in enumerate(proto.pieces):
        if i in ids and piece.type != UNKNOWN:
            piece.type = CONTROL
    return proto.SerializeToString()


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
    proto = _parsed(b"")
    for piece, score, kind in zip(pieces, scores, types, strict=True):
        known = kind if NORMAL <= kind <= BYTE else NORMAL
        proto.pieces.add(piece=piece, score=score, type=known)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, BYTE in types
    trainer.unk_id = types.index(UNKNOWN) if UNKNOWN in types else 0  # the only one that must exist
    trainer.bos_id = trainer.eos_id = trainer.pad_id = -1
    normalizer.name, normalizer.add_dummy_prefix = "identity", add_space
    normalizer.remove_extra_whitespaces = collapse_spaces
    normalizer.escape_whitespaces = True  # as U+2581
    return proto.SerializeToString()


def adds_space(model: bytes) -> bool:
    """Whether a space is put before a text."""
    return _parsed(model).normalizer_spec.add_dummy_prefix


def _parsed(model: bytes) -> Any:
    """A serialised model as the package's message ModelProto."""
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(model)
