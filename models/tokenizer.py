"""Text to token ids and back, from `tokenizer.json` or a SentencePiece `tokenizer.model`.

Decoding is done here: a table has the bytes of every id, and a text is their concatenation, decoded
as UTF-8. So streamed pieces (`Pieces`) add up to exactly the result of `decode`, a token has the
same cost at any length, and both kinds of file behave alike. It agrees with the `tokenizers`
package on all valid UTF-8 (broken byte runs may show another number of replacement marks).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError
from jaxkv.files import reading
from jaxkv.models.hf.folder import read_json

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The steps of a decoder in tokenizer.json that a table of bytes can represent.
STEPS = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
SPACE = "\u2581"  # SentencePiece's mark for a space
END_TEXT = "<|endoftext|>"  # ends a document
SINK_TEXTS = ("<|sink|>", "<|sink2|>")  # the tokens of learned sinks (models/data.py)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """The tokenizer of one model.

    table: the bytes of each id. special: ids that decode to nothing. front: ids that the model
    expects before a text, most often its BOS. strip: the number of spaces removed at the
    beginning of a decoded text (SentencePiece adds one when it encodes). special_texts: what in a
    text becomes a special id. sinks: those of `front` that begin every stream, also a chat, whose
    template writes the BOS itself. backend: that of the `tokenizers` package, where it is one.
    """

    ids_of: Callable[[str], list[int]] = field(repr=False)
    table: tuple[bytes, ...] = field(repr=False)
    special: frozenset[int] = field(repr=False)
    bos: int | None
    eos: tuple[int, ...]
    front: tuple[int, ...] = ()
    strip: int = 0
    special_texts: tuple[str, ...] = field(default=(), repr=False)
    sinks: tuple[int, ...] = ()
    backend: Any = field(default=None, repr=False)

    @property
    def adds_bos(self) -> bool:
        """Whether the model expects ids before a text."""
        return bool(self.front)

    @property
    def vocab(self) -> int:
        """The number of ids, added tokens included."""
        return len(self.table)

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        """The ids of a text, of any length, encoded as one string.

        bos: True prepends the ids that the model expects, or else the BOS, if there is one; None
        prepends only the ids that the model expects; False prepends nothing.
        Special tokens written out in the text become their ids, as in a chat template.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"text must be valid Unicode, got a lone surrogate at character {error.start}; "
                "save it as UTF-8"
            ) from None
        begin = () if self.bos is None else (self.bos,)
        head = self.front if bos is None else (self.front or begin) if bos else ()
        return [*head, *(self.ids_of(text) if text else ())]

    def decode(self, ids: Iterable[int], special: bool = False, start: bool = True) -> str:
        """The text of ids.

        special: write special tokens out instead of omitting them. start: the ids begin a
        text; False keeps the space in front of a first word that continues another text.
        """
        pieces = Pieces(self, special, start)
        return pieces.push(*ids) + pieces.end()


class Pieces:
    """Incremental decoding: only whole characters; the pieces add up to `decode`."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False, start: bool = True) -> None:
        self._table = tokenizer.table
        self._silent = frozenset() if special else tokenizer.special
        self._strip = tokenizer.strip if start else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, *ids: int) -> str:
        """Add ids. Returns the text that is complete now."""
        size = len(self._table)
        # Embeddings are often padded beyond the vocabulary: such ids have no text.
        raw = b"".join(self._table[i] for i in ids if i < size and i not in self._silent)
        if raw and self._strip:
            spaces = min(self._strip, len(raw) - len(raw.lstrip(b" ")))
            self._strip = self._strip - spaces if spaces == len(raw) else 0
            raw = raw[spaces:]
        return self._utf8.decode(raw)

    @property
    def halfway(self) -> bool:
        """Whether the last tokens are the beginning of a character."""
        return bool(self._utf8.getstate()[0])

    def end(self) -> str:
        """The rest at the end of a text: a replacement mark for an incomplete character."""
        return self._utf8.decode(b"", final=True)


@reading()
def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder; tokenizer.json wins over tokenizer.model."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}; name the folder of a model")
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder)
    if (folder / "tokenizer.model").is_file():
        return _from_sentencepiece(folder)
    raise UserError(f"no tokenizer in {folder}: neither tokenizer.json nor tokenizer.model")


def _from_json(folder: Path) -> Tokenizer:
    try:
        import tokenizers
    except ImportError:
        raise _lacks("tokenizers", folder / "tokenizer.json") from None
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except OSError:
        raise
    except Exception as error:  # the package raises bare Exception for every bad file
        raise UserError(f"{path} is corrupt: {error}; download it again") from None
    front = _front(backend)
    bos, eos = _specials(folder, backend.token_to_id)
    return tokenizer_of(backend, path, front[0] if front else bos, eos, front)


def tokenizer_of(
    backend: Any, path: Path, bos: int | None, eos: Sequence[int], front: Sequence[int]
) -> Tokenizer:
    """A Tokenizer from one of the `tokenizers` package.

    path: the source, for error messages. front: ids that the model expects before a text.
    Raises UserError for a decoder that a table of bytes cannot represent.
    """
    backend.no_truncation()
    backend.no_padding()

    def ids_of(text: str) -> list[int]:
        # The fast variant keeps no offsets: half the time and half the memory on a whole book.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    steps = _steps(backend.decoder, path)
    tokens = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    return Tokenizer(
        ids_of=ids_of,
        table=_table(tokens, _byte_level if "ByteLevel" in steps else _sentencepiece_bytes(steps)),
        special=frozenset(i for i, token in added.items() if token.special),
        bos=bos,
        eos=tuple(eos),
        front=tuple(front),
        strip=_strip(steps),
        special_texts=tuple(token.content for token in added.values() if token.special),
        sinks=tuple(i for i in front if backend.id_to_token(i) in SINK_TEXTS),
        backend=backend,
    )


def _front(backend: Any) -> list[int]:
    """The ids put before a text, found by encoding the first text that has a token."""
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    for text in ("a", *(token for token, i in vocabulary.items() if i not in added)):
        plain, full = (backend.encode(text, add_special_tokens=flag).ids for flag in (False, True))
        if plain:
            # Ids after the text, such as an EOS that some tokenizers add, are no part of a prompt.
            return next((full[:n] for n in range(len(full)) if full[n:][: len(plain)] == plain), [])
    return []


def _from_sentencepiece(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.model"
    backend = sentencepiece_processor(path, path.read_bytes())
    added = {str(token): int(i) for token, i in read_json(folder / "added_tokens.json").items()}
    marks = marks_of(backend) | added
    bos, eos = _specials(folder, marks.get)
    bos = bos if bos is not None or backend.bos_id() < 0 else backend.bos_id()
    expects = read_json(folder / "tokenizer_config.json").get("add_bos_token", True) is not False
    return tokenizer_of_sentencepiece(
        backend,
        marks,
        bos=bos,
        eos=eos or tuple(i for i in [backend.eos_id()] if i >= 0),
        front=(bos,) if expects and bos is not None else (),
    )


def sentencepiece_processor(path: Path, model: bytes) -> Any:
    """The `sentencepiece` package's processor of a serialised model; path: for error messages."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise _lacks("sentencepiece", path) from None
    try:
        backend = SentencePieceProcessor(model_proto=model)
        backend.vocab_size()
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{path} is corrupt: {str(error).splitlines()[0]}; download it again"
        ) from None
    return backend


def marks_of(backend: Any) -> dict[str, int]:
    """The pieces that SentencePiece never finds in a text: control and unknown pieces."""
    # Unknown pieces are silent too, as in tokenizer.json, where <unk> is a special token.
    silent = (
        i for i in range(backend.vocab_size()) if backend.is_control(i) or backend.is_unknown(i)
    )
    return {backend.id_to_piece(i): i for i in silent}


def tokenizer_of_sentencepiece(
    backend: Any, marks: Mapping[str, int], bos: int | None, eos: Sequence[int],
    front: Sequence[int], strip: int = 1,
) -> Tokenizer:  # fmt: skip
    """A Tokenizer from a SentencePiece processor.

    marks: special tokens, matched whole in a text and decoded to nothing. strip: 1 if the
    processor puts a space before a text.
    """
    pieces = {i: backend.id_to_piece(i) for i in range(backend.vocab_size())}
    found = re.compile("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")")

    def ids_of(text: str) -> list[int]:
        parts = found.split(text) if marks else [text]
        each = ([marks[p]] if p in marks else backend.encode(p) for p in parts if p)
        return [i for part in each for i in part]

    return Tokenizer(
        ids_of=ids_of,
        table=_table(
            pieces | {i: token for token, i in marks.items()}, _sentencepiece_bytes(SENTENCEPIECE)
        ),
        special=frozenset(marks.values()),
        bos=bos,
        eos=tuple(eos),
        front=tuple(front),
        strip=strip,
        special_texts=tuple(marks),
    )


SENTENCEPIECE: dict[str, Any] = {"ByteFallback": {}, "Metaspace": {"replacement": SPACE}}


def _steps(decoder: Any, path: Path) -> dict[str, dict[str, Any]]:
    """The steps of a decoder by type; raises UserError for steps that a table cannot represent."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    unknown = [str(step["type"]) for step in steps if step["type"] not in STEPS]
    if unknown:
        raise UserError(
            f"{path}: unsupported decoder {', '.join(unknown)}; supported: "
            f"{', '.join(sorted(STEPS))}"
        )
    return {step["type"]: step for step in steps}


def _strip(steps: Mapping[str, Mapping[str, Any]]) -> int:
    """The number of leading spaces that the decoder removes from a text."""
    if "Metaspace" in steps:
        return int(steps["Metaspace"].get("prepend_scheme") != "never")
    return int(steps["Strip"]["start"]) if "Strip" in steps else 0


def _table(tokens: Mapping[int, str], bytes_of: Callable[[str], bytes]) -> tuple[bytes, ...]:
    """The bytes of every id; ids without a token have none."""
    size = max(tokens, default=-1) + 1
    return tuple(bytes_of(tokens[i]) if i in tokens else b"" for i in range(size))


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte, the unprintable ones from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}


LETTERS = _byte_letters()


def _byte_level(token: str) -> bytes:
    """The bytes of a byte-level token; a token outside the alphabet was added as plain text."""
    if all(letter in LETTERS for letter in token):
        return bytes(LETTERS[letter] for letter in token)
    return token.encode()


def _sentencepiece_bytes(steps: Mapping[str, Mapping[str, Any]]) -> Callable[[str], bytes]:
    """The bytes of SentencePiece-like tokens: a mark for spaces, <0xNN> for single bytes."""
    replace = steps.get("Replace", {})
    mark = replace.get("pattern", {}).get("String") or steps.get("Metaspace", {}).get("replacement")
    space = replace.get("content", " ")

    def bytes_of(token: str) -> bytes:
        byte = BYTE.fullmatch(token) if "ByteFallback" in steps else None
        if byte:
            return bytes([int(byte[1], 16)])
        return (token.replace(mark, space) if mark else token).encode()

    return bytes_of


def _specials(
    folder: Path, id_of: Callable[[str], int | None]
) -> tuple[int | None, tuple[int, ...]]:
    """BOS and EOS ids: the tokenizer's own files first, else the ids in the model's config."""
    tokens = read_json(folder / "special_tokens_map.json")
    tokens |= read_json(folder / "tokenizer_config.json")
    model = read_json(folder / "config.json")
    model |= read_json(folder / "generation_config.json")

    def ids(name: str) -> list[int]:
        if f"{name}_token" in tokens:
            token = tokens[f"{name}_token"]
            token = token.get("content") if isinstance(token, dict) else token
            found = id_of(token) if isinstance(token, str) else None
            return [] if found is None else [found]
        value = model.get(f"{name}_token_id")
        return value if isinstance(value, list) else [] if value is None else [value]

    return next(iter(ids("bos")), None), tuple(ids("eos"))


def _lacks(package: str, path: Path) -> UserError:
    return UserError(f"reading {path} needs the package {package} (pip install {package})")
