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

from jaxkv.errors import UserError, check_text
from jaxkv.files import reading
from jaxkv.models.loading import package_coder, sentencepiece
from jaxkv.models.loading.added_tokens import FLAGS, AddedToken, TextPart, splitter
from jaxkv.models.loading.hf.tokenizer_config import (
    TokenizerConfig,
    embedding_rows,
    read_tokenizer_config,
)
from jaxkv.models.loading.sentencepiece import SPACE

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The steps of a decoder in tokenizer.json that a table of bytes can represent.
STEPS = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
SENTENCEPIECE: dict[str, Any] = {"ByteFallback": {}, "Metaspace": {"replacement": SPACE}}
END_TEXT = "<|endoftext|>"  # ends a document
SINK_TEXTS = ("<|sink|>", "<|sink2|>")  # the tokens of learned sinks (models/training/data.py)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """The tokenizer of one model.

    table: the bytes of each id. special: ids that decode to nothing. front: ids that the model
    expects before a text, most often its BOS. strip: the number of spaces removed at the
    beginning of a decoded text (SentencePiece adds one when it encodes). added: the added tokens,
    each of which has its id in a text. sinks: the ids of `front` that begin every stream, also a
    chat, whose template writes the BOS itself. backend: the tokenizer of the `tokenizers` package,
    where it is one. ids_of: returns the ids of a text; takes `start` and `separator` of `encode`.
    """

    ids_of: Callable[[str, bool, str], list[int]] = field(repr=False)
    table: tuple[bytes, ...] = field(repr=False)
    special: frozenset[int] = field(repr=False)
    bos: int | None
    eos: tuple[int, ...]
    front: tuple[int, ...] = ()
    strip: int = 0
    added: tuple[AddedToken, ...] = field(default=(), repr=False)
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

    def encode(
        self, text: str, bos: bool | None = None, start: bool = True, separator: str = ""
    ) -> list[int]:
        """The ids of a text, of any length, encoded as one string.

        bos: True prepends the ids that the model expects, or else the BOS, if there is one; None
        prepends only the ids that the model expects; False prepends nothing.
        start: the text begins; False: it continues another one, so nothing is put before it.
        Added tokens written out in the text become their ids, as in a chat template.
        separator: a character that is no part of the text; an added token that contains it is text.
        """
        check_text("text", text)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"text must be valid Unicode, got a lone surrogate at character {error.start}; "
                "save it as UTF-8"
            ) from None
        begin = () if self.bos is None else (self.bos,)
        head = self.front if bos is None else (self.front or begin) if bos else ()
        return [*head, *(self.ids_of(text, start, separator) if text else ())]

    def decode(self, ids: Iterable[int], special: bool = False, start: bool = True) -> str:
        """The text of ids.

        special: write special tokens out instead of omitting them. start: the ids begin a
        text; False keeps the space in front of a first word that continues another text.
        """
        pieces = Pieces(self, special, start)
        return pieces.push(*ids) + pieces.end()


class Pieces:
    """Incremental decoding: only whole characters; the pieces add up to `decode`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        special: bool = False,
        start: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """special: write special tokens out; shown: these alone. start: as in `decode`."""
        self._table = tokenizer.table
        self._silent = frozenset() if special else tokenizer.special - shown
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
        rows = embedding_rows(folder)
        if any(token.id >= rows for token in _added(backend)):
            fields = json.loads(path.read_bytes())
            fields["added_tokens"] = [t for t in fields["added_tokens"] if t["id"] < rows]
            backend = tokenizers.Tokenizer.from_str(json.dumps(fields))
    except (OSError, UserError):
        raise
    except Exception as error:  # the package raises bare Exception for every bad file
        raise UserError(f"{path} is corrupt: {error}; download it again") from None
    config = read_tokenizer_config(
        folder, backend.token_to_id, _added(backend), backend.get_vocab_size()
    )
    _apply(backend, config, path)
    front, bos = _front(backend), config.bos
    if config.adds_bos is False:
        bos, front = (front[0] if bos is None and front else bos), []
    elif config.adds_bos and not front and bos is not None:
        front = [bos]
    return tokenizer_of(backend, path, front[0] if front else bos, config.eos, front)


def _added(backend: Any) -> list[AddedToken]:
    """The added tokens of one of the package."""
    return [
        AddedToken(token.content, i, token.special, *(getattr(token, flag) for flag in FLAGS))
        for i, token in sorted(backend.get_added_tokens_decoder().items())
    ]


def _apply(backend: Any, config: TokenizerConfig, path: Path) -> None:
    """Give a tokenizer the added tokens and the space of its configuration."""
    import tokenizers

    present = set(_added(backend))
    for token in config.added:
        if token not in present:
            flags = {name: getattr(token, name) for name in (*FLAGS, "special")}
            backend.add_tokens([tokenizers.AddedToken(token.text, **flags)])
            if (i := backend.token_to_id(token.text)) != token.id:
                raise UserError(
                    f"{path} gives the id {i} to {token.text!r:.60}, and its configuration "
                    f"{token.id}; download it again"
                )
    splits = backend.pre_tokenizer
    if config.adds_space is not None and isinstance(splits, tokenizers.pre_tokenizers.ByteLevel):
        splits.add_prefix_space = config.adds_space


def text_coder(
    split: Callable[[str, bool], list[TextPart]],
    ids: Callable[[Sequence[TextPart], bool], list[int]],
    text_ids: Callable[[str], list[int]] | None = None,
) -> Callable[[str, bool, str], list[int]]:
    """The function `ids_of` of a tokenizer: the only one from text and added tokens to ids.

    split: cuts a text, which begins or not, at its added tokens. ids: gives the ids of the parts of
    one text, and takes whether it begins.
    text_ids: a faster way for a text that begins and has no cuts.
    """

    def ids_of(text: str, start: bool = True, separator: str = "") -> list[int]:
        if text_ids is not None and start and not separator:
            return text_ids(text)
        parts = split(text, start)
        if separator:
            parts = [
                part.replace(separator, "") if isinstance(part, str) else part for part in parts
            ]
        return ids([part for part in parts if part != ""], start)

    return ids_of


def tokenizer_of(
    backend: Any,
    path: Path,
    bos: int | None,
    eos: Sequence[int],
    front: Sequence[int],
    split: Callable[[Sequence[AddedToken]], Callable[[str], list[TextPart]]] | None = None,
) -> Tokenizer:
    """A Tokenizer from one of the `tokenizers` package.

    path: the source, for error messages. front: ids that the model expects before a text. split:
    how a text is cut at added tokens; None leaves it to the package.
    Raises UserError for a decoder that a table of bytes cannot represent.
    """
    backend.no_truncation()
    backend.no_padding()
    added = tuple(_added(backend))
    coder = package_coder.PackageCoder(backend, added)
    steps = steps_of(backend.decoder, path)
    tokens = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
    return Tokenizer(
        ids_of=text_coder(package_coder.splitter(backend, added), coder.ids, coder.text_ids)
        if split is None
        else text_coder(_anywhere(split(added)), coder.ids),
        table=table_of(tokens, byte_level if "ByteLevel" in steps else sentencepiece_bytes(steps)),
        special=frozenset(token.id for token in added if token.special),
        bos=bos,
        eos=tuple(eos),
        front=tuple(front),
        strip=strip_of(steps),
        added=added,
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
    model = path.read_bytes()
    pieces = sentencepiece.processor(path, model)
    config = read_tokenizer_config(
        folder,
        lambda text: i if pieces.id_to_piece(i := pieces.piece_to_id(text)) == text else None,
        sentencepiece.added_pieces(model),
        pieces.vocab_size(),
    )
    bos = config.bos if config.bos is not None or pieces.bos_id() < 0 else pieces.bos_id()
    adds_space = sentencepiece.adds_space(model) and config.adds_space is not False
    return tokenizer_of_sentencepiece(
        path,
        model,
        config.added,
        bos=bos,
        eos=config.eos or tuple(i for i in [pieces.eos_id()] if i >= 0),
        front=(bos,) if config.adds_bos is not False and bos is not None else (),
        adds_space=adds_space,
        # As before transformers 5, and as in llama.cpp, where a folder does not say.
        legacy=config.legacy is not False,
    )


def tokenizer_of_sentencepiece(
    path: Path,
    model: bytes,
    added: Sequence[AddedToken],
    bos: int | None,
    eos: Sequence[int],
    front: Sequence[int],
    adds_space: bool,
    legacy: bool = True,
    split: Callable[[Sequence[AddedToken]], Callable[[str], list[TextPart]]] = splitter,
) -> Tokenizer:
    """A Tokenizer from a serialised SentencePiece model; path: the source, for error messages.

    added: matched whole in a text; special ones decode to nothing. adds_space: put a space before a
    text; legacy: also after each added token, and before another space.
    """
    coder = sentencepiece.coder(path, model, added, adds_space, legacy)
    pieces = {i: coder.first.id_to_piece(i) for i in range(coder.first.vocab_size())}
    return Tokenizer(
        ids_of=text_coder(_anywhere(split(added)), coder.ids),
        table=table_of(
            pieces | {token.id: token.text for token in added}, sentencepiece_bytes(SENTENCEPIECE)
        ),
        special=frozenset(token.id for token in added if token.special),
        bos=bos,
        eos=tuple(eos),
        front=tuple(front),
        strip=int(adds_space),
        added=tuple(added),
    )


def _anywhere(split: Callable[[str], list[TextPart]]) -> Callable[[str, bool], list[TextPart]]:
    """A splitter to which it makes no difference whether a text begins or goes on."""
    return lambda text, start: split(text)


def steps_of(decoder: Any, path: Path) -> dict[str, dict[str, Any]]:
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


def strip_of(steps: Mapping[str, Mapping[str, Any]]) -> int:
    """The number of leading spaces that the decoder removes from a text."""
    if "Metaspace" in steps:
        return int(steps["Metaspace"].get("prepend_scheme") != "never")
    return int(steps["Strip"]["start"]) if "Strip" in steps else 0


def table_of(tokens: Mapping[int, str], bytes_of: Callable[[str], bytes]) -> tuple[bytes, ...]:
    """The bytes of every id; ids without a token have none."""
    size = max(tokens, default=-1) + 1
    return tuple(bytes_of(tokens[i]) if i in tokens else b"" for i in range(size))


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte, the unprintable ones from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


LETTERS = _byte_letters()


def byte_level(token: str) -> bytes:
    """The bytes of a byte-level token; a token outside the alphabet was added as plain text."""
    if all(letter in LETTERS for letter in token):
        return bytes(LETTERS[letter] for letter in token)
    return token.encode()


def sentencepiece_bytes(steps: Mapping[str, Mapping[str, Any]]) -> Callable[[str], bytes]:
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


def _lacks(package: str, path: Path) -> UserError:
    return UserError(f"reading {path} needs the package {package} (pip install {package})")
