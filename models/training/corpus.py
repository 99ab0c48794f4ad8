"""Turn texts into a data folder: a tokenizer, token shards, the manifest.

The parts of the corpus are tokenized first (token_parts.py). Then they are joined to shards,
and the manifest is written last: a folder with a manifest is complete.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer as Coder

from jaxkv.errors import UserError, check_int
from jaxkv.files import whole_file
from jaxkv.models.training import data, data_tokenizer, text_files, token_parts
from jaxkv.models.training.data import (
    END,
    FORMAT,
    MANIFEST,
    SPECIAL,
    SPLITS,
    TOKENIZER,
    DataFolder,
    sha256_of,
    with_checksum,
)
from jaxkv.models.training.run_folder import check_owner, lock_folder, writing
from jaxkv.models.training.text_files import ReadSettings, TextFile
from jaxkv.models.training.token_parts import PARTS, Count, Part, Tokenizing

SHARD = 2**24  # most tokens per shard: 32 MiB in 16 bits

Report = Callable[[str, int, int], None]  # called with the phase, what is done of it, and all


def prepare(
    texts: Sequence[Path],
    out: Path,
    vocab: int | None = None,
    tokenizer: Path | str | None = None,
    valid: Sequence[Path] = (),
    share: float = 0.02,
    dtype: Literal["auto", "uint16", "uint32"] = "auto",
    remove: str | None = None,
    column: str = "text",
    processes: int = 1,
    progress: Report = lambda phase, done, total: None,
) -> DataFolder:
    """Write the token shards of some texts, and their tokenizer; an interrupted run is resumed.

    texts, valid: files and folders (text_files.py). Without `valid`, the hash of a document
    assigns it to the valid split with probability `share`. vocab: train a byte-level BPE of that
    size on the training texts; tokenizer: use this tokenizer.json, or that of a model as
    `models.load` names it, instead. remove: a regular expression whose matches are removed from
    every document. column: the field of JSON lines, and the column of Parquet files, with the text.
    processes: the result does not depend on their number.
    Raises UserError for a text that cannot be read, ids that do not fit `dtype`, and an `out` with
    other files or of another run.
    """
    if (vocab is None) == (tokenizer is None):
        raise UserError("give either a vocabulary size or a tokenizer.json, and not both")
    check_int("processes", processes)
    if vocab is not None:
        data_tokenizer.dtype_for(vocab, dtype)  # before minutes of training one
    _check_pattern(remove)
    files = text_files.find(texts, valid, share, processes, _phase(progress, "reading"))
    coder, end = (None, END) if tokenizer is None else data_tokenizer.take(tokenizer)
    run = {
        "format": FORMAT,
        "texts": f"{len(files)} file(s), sha256 {_hash_of([f[1:] for f in files])}",
        "valid_share": None if valid else share,
        "tokenizer": vocab if coder is None else f"sha256 {_hash_of(coder.to_str())}",
        "end": end,
        "dtype": dtype,
        "removed": remove,
        "column": column,
        "part": text_files.PART,
    }
    check_owner(out, run)
    if (out / MANIFEST).is_file():
        return data.read(out)
    reading = ReadSettings(column, remove, share, coder is None or data_tokenizer.can_cut(coder))
    parts = text_files.divide(files, reading)
    if coder is None and (out / TOKENIZER).is_file():
        coder = data_tokenizer.read(out / TOKENIZER)
    elif coder is None:
        texts_of = _training_texts(parts, reading, _phase(progress, "training the tokenizer"))
        coder = data_tokenizer.train(texts_of, vocab)
    size = max(coder.get_vocab(with_added_tokens=True).values()) + 1
    kind = data_tokenizer.dtype_for(size, dtype)
    special = {name: coder.token_to_id(name) for name in SPECIAL} | {END: coder.token_to_id(end)}
    how = Tokenizing(out, reading, kind.name, special[END])
    with lock_folder(out, run), writing(out):
        about = {"vocab": size, "dtype": kind.name, "removed": remove, "special": special}
        return _write(how, files, parts, coder, about, processes, progress)


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


def _training_texts(
    parts: Sequence[Part], reading: ReadSettings, report: Callable[[int, int], None]
) -> Iterator[str]:
    """The texts of the train split."""
    sections = [section for part in parts for section in part if section.split != "valid"]
    total, done = sum(section.size for section in sections), 0
    for section in sections:
        texts = text_files.read(section, reading)
        yield from (text.text for text in texts if text.split == "train" and text.text)
        done += section.size
        report(done, total)


def _write(
    how: Tokenizing,
    files: Sequence[TextFile],
    parts: Sequence[Part],
    coder: Coder,
    about: dict[str, Any],
    processes: int,
    progress: Report,
) -> DataFolder:
    """Write what is missing of a data folder."""
    out = how.out
    (out / PARTS).mkdir(exist_ok=True)
    for partial in (out / PARTS).glob(".*"):  # of a run that was killed
        partial.unlink(missing_ok=True)
    with whole_file(out / TOKENIZER) as file:
        file.write(coder.to_str(pretty=True).encode())
    counts = _tokenize(how, parts, processes, _phase(progress, "tokenizing"))
    documents, tokens = Counter(), Counter()
    for file, split, count, length in itertools.chain(*counts):
        documents[file, split] += count
        tokens[file, split] += length
    text_files.check_splits({split for (_, split), count in documents.items() if count})
    listed = [
        {
            "file": file.name,
            "sha256": file.sha256,
            "documents": {s: documents[n, s] for s in SPLITS if documents[n, s]},
            "tokens": {s: tokens[n, s] for s in SPLITS if documents[n, s]},
        }
        for n, file in enumerate(files)
    ]
    shards = _join(how, counts, _phase(progress, "writing the shards"))
    manifest = with_checksum({
        "format": FORMAT,
        **about,
        "tokenizer": sha256_of(out / TOKENIZER),
        "files": listed,
        "shards": shards,
    })  # fmt: skip
    with whole_file(out / MANIFEST) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    shutil.rmtree(out / PARTS)
    return DataFolder(out, manifest)


def _tokenize(
    how: Tokenizing, parts: Sequence[Part], processes: int, report: Callable[[int, int], None]
) -> list[list[Count]]:
    """Tokenize the parts that are not complete. Returns the counts of all."""
    sizes = [sum(section.size for section in part) for part in parts]
    missing = {n: part for n, part in enumerate(parts) if how.counts(n) is None}
    done = sum(sizes) - sum(sizes[n] for n in missing)
    report(done, sum(sizes))

    def finished(number: int) -> None:
        nonlocal done
        done += sizes[number]
        report(done, sum(sizes))

    token_parts.tokenize(how, missing, processes, finished)
    return [how.counts(n) for n in range(len(parts))]


def _join(
    how: Tokenizing,
    counts: Sequence[Sequence[Count]],
    report: Callable[[int, int], None],
) -> dict[str, list[dict[str, Any]]]:
    """Join the tokens of all parts to shards of SHARD tokens. Returns their manifest entries.

    A part is deleted once its tokens are in shards, so the disk holds most tokens once. A run that
    was killed here finds the shards that are complete, and skips their tokens.
    """
    shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    lengths = {s: [sum(c[3] for c in part if c[1] == s) for part in counts] for s in SPLITS}
    total = sum(map(sum, lengths.values()))
    done = 0
    for split in SPLITS:
        ends = np.cumsum(lengths[split])
        for start in range(0, int(ends[-1]), SHARD):
            stop = min(start + SHARD, int(ends[-1]))
            path = how.out / f"{split}-{len(shards[split]):05}.npy"
            if not path.exists():
                _write_shard(how, split, ends, start, stop, path)
            shards[split].append(
                {"file": path.name, "tokens": stop - start, "sha256": sha256_of(path)}
            )
            for number in np.flatnonzero((start < ends) & (ends <= stop)):
                how.file(int(number), split).unlink(missing_ok=True)
            done += stop - start
            report(done, total)
    return shards


def _write_shard(
    how: Tokenizing, split: str, ends: np.ndarray, start: int, stop: int, path: Path
) -> None:
    """Write tokens start to stop of a split, which are in the files of several parts."""
    kind, arrays = np.dtype(how.dtype), []
    number = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        begin = int(ends[number - 1]) if number else 0
        count = min(stop, int(ends[number])) - start
        file = how.file(number, split)
        arrays.append(np.fromfile(file, kind, count, offset=(start - begin) * kind.itemsize))
        start, number = start + count, number + 1
    raw = io.BytesIO()
    np.save(raw, np.concatenate(arrays))
    with whole_file(path) as file:
        file.write(raw.getbuffer())
