"""Turn texts into a data folder: a tokenizer trained on them, token shards, the manifest."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer as Coder
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from jaxkv.errors import UserError
from jaxkv.files import decode, whole_file
from jaxkv.models.data import (
    END,
    FORMAT,
    MANIFEST,
    SECOND_SINK,
    SINK,
    SPECIAL,
    SPLITS,
    TOKENIZER,
    DataFolder,
    sha256_of,
    with_checksum,
)
from jaxkv.models.published import open_published

SHARD = 2**24  # most tokens per shard: 32 MiB in 16 bits
_PIECE = 2**20  # characters encoded at a time
# A shard, or the partial file of a run that was killed.
_OURS = re.compile(r"\.?(train|valid)-\d{5}\.npy(\..*)?|\.(tokenizer|manifest)\.json\..*")
_LINE = re.compile(r"(?<=[^\W_])(?=\n)")  # cuts are allowed between a letter and a line end


def prepare(
    texts: Sequence[Path],
    out: Path,
    vocab: int | None = None,
    tokenizer: Path | str | None = None,
    valid: Sequence[Path] = (),
    share: float = 0.02,
    dtype: Literal["auto", "uint16", "uint32"] = "auto",
    remove: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DataFolder:
    """Write the token shards of some texts, and their tokenizer.

    texts, valid: files, or folders, which stand for every *.txt in them. A file is one document and
    belongs to one split. Without `valid`, the hash of a text assigns it to the valid split with
    probability `share`. vocab: train a byte-level BPE of that size on the training texts;
    tokenizer: use this tokenizer.json, or that of a model as `models.load` names it, instead.
    remove: a regular expression whose matches are removed from every text. progress: called with
    (bytes done, all bytes).
    Raises UserError for a text that cannot be read, ids that do not fit `dtype`, or an `out` with
    other files.
    """
    if (vocab is None) == (tokenizer is None):
        raise UserError("give either a vocabulary size or a tokenizer.json, and not both")
    if vocab is not None:
        _dtype_for(vocab, dtype)  # before minutes of training one
    _check_ours(out)
    read_text = _reader(remove)
    documents = _splits(texts, valid, share)
    sizes = {path: path.stat().st_size for split in SPLITS for path in documents[split]}
    # Training a tokenizer reads each training text once more before it is encoded.
    first = sum(sizes[path] for path in documents["train"]) if tokenizer is None else 0
    report = lambda done: progress and progress(done, first + sum(sizes.values()))  # noqa: E731
    if tokenizer is None:
        coder, end = _train(documents["train"], read_text, vocab, report), END
    else:
        coder, end = _take(tokenizer)
    coder.encode_special_tokens = True  # in a text, their names are ordinary letters
    size = max(coder.get_vocab(with_added_tokens=True).values()) + 1
    kind = _dtype_for(size, dtype)
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)  # removed until the new one is complete
    special = {name: coder.token_to_id(name) for name in SPECIAL} | {END: coder.token_to_id(end)}
    then = lambda done: report(first + done)  # noqa: E731
    shards, listed = _write(out, kind, coder, special[END], documents, read_text, then)
    with whole_file(out / TOKENIZER) as file:
        file.write(coder.to_str(pretty=True).encode())
    manifest = with_checksum({
        "format": FORMAT,
        "vocab": size,
        "dtype": kind.name,
        "removed": remove,
        "special": special,
        "tokenizer": sha256_of(out / TOKENIZER),
        "documents": listed,
        "shards": shards,
    })  # fmt: skip
    with whole_file(out / MANIFEST) as file:  # last: a folder with a manifest is complete
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    return DataFolder(out, manifest)


def _check_ours(out: Path) -> None:
    """Raise UserError for a folder with files that `jaxkv data` did not write."""
    found = {path.name for path in out.iterdir()} if out.is_dir() else set()
    others = {name for name in found if not (_OURS.fullmatch(name) and _is_ours(out / name))}
    if len(others) < len(found):  # a folder of shards, complete or partial
        others -= {MANIFEST, TOKENIZER}
    if others:
        raise UserError(
            f"--out must be a new folder, or one that `jaxkv data` wrote; {out} holds "
            f"{min(others)}; name another"
        )


def _is_ours(path: Path) -> bool:
    """Whether a file with such a name may be ours: a shard, a partial file, or an empty one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix != ".npy" or file.read(6) in (b"", b"\x93NUMPY")


def _write(
    out: Path,
    kind: np.dtype,
    coder: Coder,
    end: int,
    documents: dict[str, list[Path]],
    read_text: Callable[[Path], str],
    report: Callable[[int], None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write the shards of every split; their entries and the documents' in the manifest."""
    done, shards, listed = 0, {}, []
    for split in SPLITS:
        writer = _Shards(out, split, kind)
        for path in documents[split]:
            text = read_text(path)
            ids = [*_encode(coder, text), end]
            writer.add(np.asarray(ids, kind))
            digest = hashlib.sha256(text.encode()).hexdigest()
            listed.append({"file": path.name, "split": split, "tokens": len(ids), "sha256": digest})
            done += path.stat().st_size
            report(done)
        shards[split] = writer.close()
    return shards, listed


def _splits(texts: Sequence[Path], valid: Sequence[Path], share: float) -> dict[str, list[Path]]:
    """The documents of each split; one that is named for both belongs to the valid split."""
    every, validation = documents_in(texts), documents_in(valid)
    if not valid:
        validation = [path for path in every if _is_valid(path, share)]
    away = {path.resolve() for path in validation}
    documents = {"train": [p for p in every if p.resolve() not in away], "valid": validation}
    for split in SPLITS:
        if not documents[split]:
            raise UserError(
                f"{split} has no document; give more texts, or name those of the valid split"
            )
    return documents


def documents_in(paths: Iterable[Path]) -> list[Path]:
    """The text files that are named, and those in the folders that are named, sorted by name."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(path.rglob("*.txt"))
            if not inside:
                raise UserError(f"no *.txt in the folder {path}; name files, or another folder")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"no such text: {path}; name a file or a folder of *.txt")
    return list(dict.fromkeys(found))


def _is_valid(path: Path, share: float) -> bool:
    """Whether the hash of a document assigns it to the valid split, whatever its path."""
    digest = hashlib.sha256(_read_bytes(path)).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _reader(remove: str | None) -> Callable[[Path], str]:
    """A function that reads a document and removes the matches of the pattern."""
    try:
        pattern = re.compile(remove) if remove is not None else None
    except re.error as error:
        raise UserError(
            f"--remove must be a regular expression, got {remove!r}: {error}; correct it"
        ) from None

    def read_text(path: Path) -> str:
        text = decode(_read_bytes(path), str(path))
        return pattern.sub("", text) if pattern else text

    return read_text


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check it") from None


def _pieces(text: str) -> Iterator[str]:
    """A long text in parts, cut where no token of a byte-level BPE crosses."""
    start = 0
    while start < len(text):
        found = _LINE.search(text, start + _PIECE)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def _train(
    documents: Sequence[Path],
    read_text: Callable[[Path], str],
    vocab: int,
    report: Callable[[int], None],
) -> Coder:
    """Train a byte-level BPE of `vocab` tokens, including 256 bytes and the special tokens."""
    least = 256 + len(SPECIAL)
    if vocab < least:
        raise UserError(
            f"a vocabulary must hold at least {least} tokens, got {vocab}; choose a larger one"
        )
    coder = Coder(BPE())
    coder.pre_tokenizer = ByteLevel(add_prefix_space=False)
    coder.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        done = 0
        for path in documents:
            yield from _pieces(read_text(path))
            done += path.stat().st_size
            report(done)

    coder.train_from_iterator(texts(), trainer)
    if coder.get_vocab_size() < vocab:
        raise UserError(
            f"the texts give only {coder.get_vocab_size()} tokens of BPE, not {vocab}; "
            "choose a smaller vocabulary, or give more text"
        )
    return coder


def _take(name: Path | str) -> tuple[Coder, str]:
    """A published tokenizer with the special tokens that it lacks, and the one that ends a text.

    name: a tokenizer.json, or a model, whose documents end with its <|endoftext|>, else its EOS.
    """
    if Path(name).suffix == ".json" or (Path(name).is_file() and Path(name).suffix != ".gguf"):
        try:
            coder, end = Coder.from_file(str(name)), END
        except Exception as error:  # the package raises bare Exception for every bad file
            raise UserError(f"{name} is not a tokenizer.json: {error}; name another") from None
    else:
        coder, end = _of_model(name)
    coder.add_special_tokens(list(dict.fromkeys((end, SINK, SECOND_SINK))))
    coder.no_truncation()
    coder.no_padding()
    return coder, end


def _of_model(name: Path | str) -> tuple[Coder, str]:
    """A copy of a model's tokenizer, and its token that ends a text."""
    published = open_published(name)
    tokenizer = published.tokenizer()
    if tokenizer.backend is None:
        raise UserError(
            f"{published.path} has a SentencePiece tokenizer, which a data folder cannot store; "
            "name a model with a tokenizer.json"
        )
    coder = Coder.from_str(tokenizer.backend.to_str())
    ends = [END] if coder.token_to_id(END) is not None else []
    ends += [coder.id_to_token(i) for i in (*tokenizer.eos, *published.config.eos)]
    if not ends:
        raise UserError(f"{published.path} has no token that ends a text; name another model")
    return coder, ends[0]


def _encode(coder: Coder, text: str) -> list[int]:
    # Other tokenizers than byte-level ones may put a space in front of each piece.
    pieces = list(_pieces(text)) if "ByteLevel" in _decoder(coder) else [text]
    parts = coder.encode_batch_fast(pieces, add_special_tokens=False)
    return [i for part in parts for i in part.ids]


def _decoder(coder: Coder) -> str:
    """The decoder's state as JSON."""
    return "" if coder.decoder is None else coder.decoder.__getstate__().decode()


def _dtype_for(vocab: int, wanted: str) -> np.dtype:
    if wanted == "uint16" and vocab > 2**16:
        raise UserError(
            f"uint16 holds ids up to 65,535, the vocabulary has {vocab:,} tokens; use uint32"
        )
    name = ("uint16" if vocab <= 2**16 else "uint32") if wanted == "auto" else wanted
    return np.dtype(name)


class _Shards:
    """Writes tokens to files of at most SHARD each."""

    def __init__(self, out: Path, split: str, dtype: np.dtype):
        self.out, self.split, self.dtype = out, split, dtype
        self.rest, self.waiting, self.written = [], 0, []

    def add(self, ids: np.ndarray) -> None:
        self.rest.append(ids)
        self.waiting += len(ids)
        while self.waiting >= SHARD:
            whole = np.concatenate(self.rest)
            self._write(whole[:SHARD])
            self.rest, self.waiting = [whole[SHARD:]], len(whole) - SHARD

    def close(self) -> list[dict[str, Any]]:
        if self.waiting:
            self._write(np.concatenate(self.rest))
        return self.written

    def _write(self, ids: np.ndarray) -> None:
        name = f"{self.split}-{len(self.written):05}.npy"
        raw = io.BytesIO()
        np.save(raw, ids.astype(self.dtype))
        with whole_file(self.out / name) as file:
            file.write(raw.getbuffer())
        digest = hashlib.sha256(raw.getbuffer()).hexdigest()
        self.written.append({"file": name, "tokens": len(ids), "sha256": digest})
