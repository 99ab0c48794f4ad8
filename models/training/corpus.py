"""Turn texts into a data folder: a tokenizer, token shards, the manifest.

The texts are read in order in one process; the package `tokenizers` tokenizes a batch of them on
all cores. The manifest is written last: a folder with a manifest is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer as Coder
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from jaxkv.errors import UserError
from jaxkv.files import atomic_file, open_regular
from jaxkv.models.loading.source import open_source
from jaxkv.models.training import data, text_files
from jaxkv.models.training.data import (
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
from jaxkv.models.training.run_folder import check_owner, lock_folder, writing
from jaxkv.models.training.text_files import ReadSettings, Text, TextFile

MAX_VOCAB = 2**20  # tokens; the trainer allocates for as many as are asked for
SHARD = 2**24  # most tokens per shard: 32 MiB in 16 bits
BATCH = 2**20  # characters that are tokenized at a time: several pieces for each core

Report = Callable[[str, int, int], None]  # called with the phase, what is done of it, and all


def prepare(
    texts: Sequence[Path],
    out: Path,
    vocab: int | None = None,
    tokenizer: Path | str | None = None,
    valid: Sequence[Path] = (),
    valid_share: float | None = None,
    dtype: Literal["auto", "uint16", "uint32"] = "auto",
    remove: str | None = None,
    column: str | None = None,
    progress: Report = lambda phase, done, total: None,
) -> DataFolder:
    """Write the token shards of some texts, and their tokenizer.

    texts, valid: files and folders (text_files.py). Without `valid`, the hash of a document
    assigns it to the valid split with probability `valid_share` (None: 0.02). vocab: train a
    byte-level BPE of that size on the training texts; tokenizer: use this tokenizer.json, or that
    of a model as `models.load` names it, instead. remove: a regular expression whose matches are
    removed from every document. column: the field of JSON lines, and the column of Parquet files,
    with the text (None: text).
    Raises UserError for a text that cannot be read, ids that do not fit `dtype`, an `out` with
    other files or of another run, and a setting that these texts do not use.
    """
    if (vocab is None) == (tokenizer is None):
        raise UserError("give either a vocabulary size or a tokenizer.json, and not both")
    if vocab is not None:
        dtype_for(vocab, dtype)  # before minutes of training one
    _check_pattern(remove)
    valid_share = text_files.share_of(valid, valid_share)
    files = text_files.find(texts, valid, valid_share, _phase(progress, "reading"))
    coder, end = (None, END) if tokenizer is None else published_tokenizer(tokenizer)
    run = {
        "format": FORMAT,
        "texts": f"{len(files)} file(s), sha256 {_hash_of([f[1:] for f in files])}",
        "valid_share": None if valid else valid_share,
        "tokenizer": vocab if coder is None else f"sha256 {_hash_of(coder.to_str())}",
        "end": end,
        "dtype": dtype,
        "removed": remove,
        "column": text_files.COLUMN if column is None else column,
    }
    check_owner(out, run)
    column = text_files.column_of(files, column)
    if (out / MANIFEST).is_file():
        return data.read(out)
    settings = ReadSettings(column, remove, valid_share, coder is None or can_cut(coder))
    if coder is None:
        read_texts = _texts(files, settings, _phase(progress, "training the tokenizer"))
        train = (text.text for _, text in read_texts if text.split == "train" and text.text)
        coder = train_tokenizer(train, vocab)
    size = max(coder.get_vocab(with_added_tokens=True).values()) + 1
    kind = dtype_for(size, dtype)
    special = {name: coder.token_to_id(name) for name in SPECIAL} | {END: coder.token_to_id(end)}
    about = {"vocab": size, "dtype": kind.name, "removed": remove, "special": special}
    read_texts = _texts(files, settings, _phase(progress, "tokenizing"))
    with lock_folder(out, run), writing(out):
        with atomic_file(out / TOKENIZER) as file:
            file.write(coder.to_str(pretty=True).encode())
        about["tokenizer"] = sha256_of(out / TOKENIZER)
        return _write(out, about, _tokenize(out, files, read_texts, kind, special[END]))


def _write(out: Path, about: dict[str, Any], contents: dict[str, Any]) -> DataFolder:
    """Write the manifest of a folder whose shards are complete."""
    manifest = with_checksum({"format": FORMAT, **about, **contents})
    with atomic_file(out / MANIFEST) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    return DataFolder(out, manifest)


def _check_pattern(remove: str | None) -> None:
    try:
        re.compile(remove or "")
    except re.error as error:
        raise UserError(
            f"--remove must be a regular expression, got {remove!r}: {error}; correct it"
        ) from None


def _hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _phase(progress: Report, phase: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(phase, done, total)


def _texts(
    files: Sequence[TextFile], settings: ReadSettings, report: Callable[[int, int], None]
) -> Iterator[tuple[int, Text]]:
    """The texts of all files, with the number of the file; reports the bytes that were read."""
    total, before = sum(file.bytes for file in files), 0
    for number, file in enumerate(files):
        for text in text_files.read(file, settings):
            yield number, text
            report(before + text.bytes_read, total)
        before += file.bytes
    report(total, total)


def _batches(texts: Iterator[tuple[int, Text]]) -> Iterator[list[tuple[int, Text]]]:
    """Texts that have about BATCH characters together."""
    batch: list[tuple[int, Text]] = []
    size = 0
    for number, text in texts:
        batch.append((number, text))
        size += len(text.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


@dataclass
class _Shards:
    """The shards of one split. entries: of the manifest. pending: tokens that are not written."""

    out: Path
    split: str
    dtype: np.dtype
    entries: list[dict[str, Any]] = field(default_factory=list)
    pending: list[np.ndarray] = field(default_factory=list)
    size: int = 0

    def add(self, ids: Sequence[int]) -> None:
        """Append tokens, and write the shards that they complete."""
        self.pending.append(np.asarray(ids, self.dtype))
        self.size += len(ids)
        while self.size >= SHARD:
            self.write(SHARD)

    def write(self, count: int) -> None:
        """Write a shard of the first `count` pending tokens."""
        tokens = np.concatenate(self.pending)
        path = self.out / f"{self.split}-{len(self.entries):05}.npy"
        with atomic_file(path) as file:
            np.save(file, tokens[:count])
        self.entries.append({"file": path.name, "tokens": count, "sha256": sha256_of(path)})
        self.pending, self.size = [tokens[count:]], self.size - count


def _tokenize(
    out: Path,
    files: Sequence[TextFile],
    texts: Iterator[tuple[int, Text]],
    dtype: np.dtype,
    end: int,
) -> dict[str, Any]:
    """Write the shards of some texts. Returns the manifest's entries of files and shards.

    texts: with the number of the file. end: the token after each document.
    """
    coder = read_tokenizer(out / TOKENIZER)
    shards = {split: _Shards(out, split, dtype) for split in SPLITS}
    documents: Counter[tuple[int, str]] = Counter()
    tokens: Counter[tuple[int, str]] = Counter()
    for batch in _batches(texts):
        # The fast variant keeps no offsets: half the time and half the memory.
        encodings = coder.encode_batch_fast([t.text for _, t in batch], add_special_tokens=False)
        for (number, text), encoding in zip(batch, encodings, strict=True):
            ids = [*encoding.ids, end] if text.last else encoding.ids
            shards[text.split].add(ids)
            documents[number, text.split] += text.last
            tokens[number, text.split] += len(ids)
    text_files.check_splits({split for (_, split), count in documents.items() if count})
    for split in shards.values():
        if split.size:
            split.write(split.size)
    listed = [
        {
            "file": file.name,
            "sha256": file.sha256,
            "documents": {s: documents[n, s] for s in SPLITS if documents[n, s]},
            "tokens": {s: tokens[n, s] for s in SPLITS if documents[n, s]},
        }
        for n, file in enumerate(files)
    ]
    return {"files": listed, "shards": {s: shard.entries for s, shard in shards.items()}}


def train_tokenizer(texts: Iterator[str], vocab: int) -> Coder:
    """Train a byte-level BPE of `vocab` tokens, including 256 bytes and the special tokens."""
    min_vocab = 256 + len(SPECIAL)
    if vocab < min_vocab:
        raise UserError(
            f"a vocabulary must hold at least {min_vocab} tokens, got {vocab}; choose a larger one"
        )
    if vocab > MAX_VOCAB:
        raise UserError(
            f"a vocabulary must hold at most {MAX_VOCAB} tokens, got {vocab}; choose a smaller one"
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
    coder.train_from_iterator(texts, trainer)
    if coder.get_vocab_size() < vocab:
        raise UserError(
            f"the texts give only {coder.get_vocab_size()} tokens of BPE, not {vocab}; "
            "choose a smaller vocabulary, or give more text"
        )
    return coder


def published_tokenizer(name: Path | str) -> tuple[Coder, str]:
    """A published tokenizer with the special tokens that it lacks, and the one that ends a text.

    name: a tokenizer.json, or a model, whose documents end with its <|endoftext|>, else its EOS.
    """
    if Path(name).suffix == ".json" or (Path(name).is_file() and Path(name).suffix != ".gguf"):
        try:
            open_regular(name).close()  # a pipe would block
            coder, end = Coder.from_file(str(name)), END
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}; name another") from None
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
    source = open_source(name)
    tokenizer = source.tokenizer()
    if tokenizer.backend is None:
        raise UserError(
            f"{source.path} has a SentencePiece tokenizer, which a data folder cannot store; "
            "name a model with a tokenizer.json"
        )
    coder = Coder.from_str(tokenizer.backend.to_str())
    ends = [END] if coder.token_to_id(END) is not None else []
    ends += [coder.id_to_token(i) for i in (*tokenizer.eos, *source.config.eos)]
    if not ends:
        raise UserError(f"{source.path} has no token that ends a text; name another model")
    return coder, ends[0]


def read_tokenizer(path: Path) -> Coder:
    """The tokenizer of a data folder, for its texts: names of special tokens are plain text."""
    coder = Coder.from_file(str(path))
    coder.encode_special_tokens = True
    return coder


def can_cut(coder: Coder) -> bool:
    """Whether the tokens of a text do not change where it is cut before a line end.

    A byte-level BPE has no token from a letter to a line end. Other tokenizers, and a byte-level
    one with `add_prefix_space`, may put a space in front of each piece.
    """
    decoder = "" if coder.decoder is None else coder.decoder.__getstate__().decode()
    pieces = ("The end", "\n\n  of line 1", "\r\nand")
    text_ids, *piece_ids = (
        coder.encode(p, add_special_tokens=False).ids for p in ("".join(pieces), *pieces)
    )
    return "ByteLevel" in decoder and text_ids == [i for ids in piece_ids for i in ids]


def dtype_for(vocab: int, dtype: str) -> np.dtype:
    if dtype == "uint16" and vocab > 2**16:
        raise UserError(
            f"uint16 holds ids up to 65,535, the vocabulary has {vocab:,} tokens; use uint32"
        )
    name = ("uint16" if vocab <= 2**16 else "uint32") if dtype == "auto" else dtype
    return np.dtype(name)
