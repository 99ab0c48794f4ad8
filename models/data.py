"""Text to token shards, and training batches that are a function of (seed, step) alone.

A data folder holds `manifest.json`, `tokenizer.json` and `train-00000.npy`, `valid-00000.npy`, ...
Each shard is a flat array of token ids; every document ends with END. A sample is a run of
consecutive tokens; which runs make up a batch follows from the seed and the step and from nothing
else, so a run that was killed sees exactly what it would have seen.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
from jaxkv.typing import Int32
from models.hf.folder import read_json

END, SINK, SECOND_SINK = "<|endoftext|>", "<|sink|>", "<|sink2|>"
SPECIAL = (END, SINK, SECOND_SINK)
SPLITS = ("train", "valid")
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
FORMAT = "jaxkv tokens 1"
SHARD = 2**24  # tokens a shard holds at most: 32 MiB in 16 bits
_PIECE = 2**20  # characters encoded at a time
_LINE = re.compile(r"(?<=[^\W_])(?=\n)")  # where they may be cut: a letter, and its line ends

Split = Literal["train", "valid"]


@dataclass(frozen=True)
class Tokens:
    """A data folder as `prepare` wrote it."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def vocab(self) -> int:
        return self.manifest["vocab"]

    @property
    def digest(self) -> str:
        """What the folder holds, in a few letters."""
        held = [self.manifest["tokenizer"], self.manifest["shards"]]
        return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]

    def id_of(self, special: str) -> int:
        return self.manifest["special"][special]

    def count(self, split: Split) -> int:
        """Tokens of a split."""
        return sum(shard["tokens"] for shard in self.manifest["shards"][split])

    @cached_property
    def _maps(self) -> dict[str, tuple[list[np.ndarray], np.ndarray]]:
        """Of each split the shards, mapped and not read, and where each begins."""
        found = {}
        for split in SPLITS:
            shards = self.manifest["shards"][split]
            maps = [np.load(self.folder / shard["file"], mmap_mode="r") for shard in shards]
            found[split] = maps, np.cumsum([0, *map(len, maps)])
        return found

    def run(self, split: Split, start: int, length: int) -> Int32[np.ndarray, " T"]:
        """Tokens start .. start+length-1 of a split."""
        maps, begins = self._maps[split]
        parts = []
        at = int(np.searchsorted(begins, start, side="right")) - 1
        while length > 0:
            within = start - begins[at]
            part = maps[at][within : within + length]
            parts.append(part)
            start, length, at = start + len(part), length - len(part), at + 1
        return np.concatenate(parts).astype(np.int32)


def batch(
    tokens: Tokens, split: Split, seed: int, step: int, rows: int, length: int
) -> Int32[np.ndarray, "B T"]:
    """The samples of one step: `rows` runs of `length` + 1 tokens.

    An epoch is every run once, in an order of its own and cut at an offset of its own.
    Raises UserError where the split holds fewer tokens than one batch.
    """
    total = tokens.count(split)
    runs = (total - 1) // length - 1  # one run less: the offset moves the cuts by up to one
    if runs < rows:
        raise UserError(
            f"a batch of {rows} samples of {length} tokens needs {(rows + 1) * length + 1:,} "
            f"tokens, {split} has {total:,}; give more text, or set a smaller batch or length"
        )
    first = step * rows
    picked = []
    for number in range(first, first + rows):
        epoch, within = divmod(number, runs)
        offset, order = _order(seed, epoch, runs, length)
        picked.append(tokens.run(split, offset + int(order[within]) * length, length + 1))
    return np.stack(picked)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, runs: int, length: int) -> tuple[int, np.ndarray]:
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return int(random.integers(length)), random.permutation(runs).astype(np.int32)


def read(folder: Path | str) -> Tokens:
    """A data folder, checked against its manifest.

    Raises UserError where it is none, a shard is missing or not what the manifest says.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}; make one with `jaxkv data`")
    remedy = "make the folder again with `jaxkv data`"
    manifest = read_json(folder / MANIFEST, remedy)
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder} is no data folder: no {MANIFEST} that says {FORMAT!r}; make one with "
            "`jaxkv data`"
        )
    if manifest.get("sha256") != _sealed(manifest)["sha256"]:
        raise UserError(f"{folder / MANIFEST} must be as it was written, and is not; {remedy}")
    shards = [shard for split in SPLITS for shard in manifest["shards"][split]]
    for told in ({"file": TOKENIZER, "sha256": manifest["tokenizer"]}, *shards):
        path = folder / told["file"]
        if not path.is_file() or _sha256(path) != told["sha256"]:
            raise UserError(
                f"{path} must be the file that {MANIFEST} tells of, and is another or not there; "
                + remedy
            )
    return Tokens(folder, manifest)


def _sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with the checksum of all else in it."""
    told = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(told, sort_keys=True).encode()
    return told | {"sha256": hashlib.sha256(text).hexdigest()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepare(
    texts: Sequence[Path],
    out: Path,
    vocab: int | None = None,
    tokenizer: Path | None = None,
    valid: Sequence[Path] = (),
    share: float = 0.02,
    dtype: Literal["auto", "uint16", "uint32"] = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Tokens:
    """Write the token shards of some texts, with the tokenizer that made them.

    texts, valid: files, or folders, of which every *.txt is taken; a file is a document and lies
    in one split as a whole. Without `valid`, a document is held back where the hash of its text
    falls into `share`. vocab: train a byte-level BPE of that size on the training texts;
    tokenizer: a tokenizer.json to take instead. progress: called with (bytes done, bytes in all).
    Raises UserError for a text that cannot be read, or ids that do not fit `dtype`.
    """
    if (vocab is None) == (tokenizer is None):
        raise UserError("give either a vocabulary size or a tokenizer.json, and not both")
    if vocab is not None:
        _dtype_for(vocab, dtype)  # before minutes of training one
    documents = _splits(texts, valid, share)
    sizes = {path: path.stat().st_size for split in SPLITS for path in documents[split]}
    # To train a tokenizer each training text is read once more, before it is encoded.
    first = sum(sizes[path] for path in documents["train"]) if tokenizer is None else 0
    told = lambda done: progress and progress(done, first + sum(sizes.values()))  # noqa: E731
    coder = _train(documents["train"], vocab, told) if tokenizer is None else _take(tokenizer)
    coder.encode_special_tokens = True  # written out in a text they are letters like others
    size = max(coder.get_vocab(with_added_tokens=True).values()) + 1
    kind = _dtype_for(size, dtype)
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)  # until the new one is whole there is none
    done, shards, listed = first, {}, []
    for split in SPLITS:
        writer = _Shards(out, split, kind)
        for path in documents[split]:
            text = _read_text(path)
            ids = [*_encode(coder, text), coder.token_to_id(END)]
            writer.add(np.asarray(ids, kind))
            digest = hashlib.sha256(text.encode()).hexdigest()
            listed.append({"file": path.name, "split": split, "tokens": len(ids), "sha256": digest})
            done += sizes[path]
            told(done)
        shards[split] = writer.close()
    with whole_file(out / TOKENIZER) as file:
        file.write(coder.to_str(pretty=True).encode())
    manifest = {
        "format": FORMAT,
        "vocab": size,
        "dtype": kind.name,
        "special": {name: coder.token_to_id(name) for name in SPECIAL},
        "tokenizer": _sha256(out / TOKENIZER),
        "documents": listed,
        "shards": shards,
    }
    manifest = _sealed(manifest)
    with whole_file(out / MANIFEST) as file:  # last: a folder with a manifest is complete
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    return Tokens(out, manifest)


def _splits(texts: Sequence[Path], valid: Sequence[Path], share: float) -> dict[str, list[Path]]:
    """The documents of each split; one that is named for both is held back."""
    every, held = documents_in(texts), documents_in(valid)
    if not valid:
        held = [path for path in every if _held_back(path, share)]
    away = {path.resolve() for path in held}
    documents = {"train": [p for p in every if p.resolve() not in away], "valid": held}
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


def _held_back(path: Path, share: float) -> bool:
    """Whether a document belongs to the valid split: by its content, wherever it lies."""
    digest = hashlib.sha256(_read_bytes(path)).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _read_text(path: Path) -> str:
    return decode(_read_bytes(path), str(path))


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


def _train(documents: Sequence[Path], vocab: int, told: Callable[[int], None]) -> Coder:
    """A byte-level BPE of `vocab` tokens, 256 bytes and the special tokens among them."""
    least = 256 + len(SPECIAL)
    if vocab < least:
        raise UserError(
            f"a vocabulary must hold at least {least} tokens, got {vocab}; ask for more"
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
            yield from _pieces(_read_text(path))
            done += path.stat().st_size
            told(done)

    coder.train_from_iterator(texts(), trainer)
    if coder.get_vocab_size() < vocab:
        raise UserError(
            f"the texts have words for {coder.get_vocab_size()} tokens and {vocab} were asked for; "
            "ask for fewer, or give more text"
        )
    return coder


def _take(path: Path) -> Coder:
    """A published tokenizer.json, with the special tokens that it lacks."""
    try:
        coder = Coder.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for every bad file
        raise UserError(f"{path} is no tokenizer.json: {error}; name another") from None
    coder.add_special_tokens(list(SPECIAL))
    coder.no_truncation()
    coder.no_padding()
    return coder


def _encode(coder: Coder, text: str) -> list[int]:
    parts = coder.encode_batch_fast(list(_pieces(text)), add_special_tokens=False)
    return [i for part in parts for i in part.ids]


def _dtype_for(vocab: int, wanted: str) -> np.dtype:
    if wanted == "uint16" and vocab > 2**16:
        raise UserError(
            f"uint16 holds ids up to 65,535, the vocabulary has {vocab:,} tokens; take uint32"
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
