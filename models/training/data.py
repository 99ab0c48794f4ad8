"""Token shards, and training batches that are a function of (seed, step) alone.

A data folder holds `manifest.json`, `tokenizer.json` and `train-00000.npy`, `valid-00000.npy`, ...
Each shard is a flat array of token ids; every document ends with END. A sample is a run of
consecutive tokens. The seed and the step alone choose the runs of a batch, so a resumed run sees
exactly the batches of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxkv.errors import UserError
from jaxkv.files import reading
from jaxkv.models.loading.hf.folder import read_json
from jaxkv.models.loading.tokenizer import END_TEXT, SINK_TEXTS
from jaxkv.typing import Int32

END, (SINK, SECOND_SINK) = END_TEXT, SINK_TEXTS
SPECIAL = (END, SINK, SECOND_SINK)
# The tokens before every sample, by the recipe's `sink_variant`.
FRONT = {"token": (SINK,), "two_tokens": (SINK, SECOND_SINK)}
SPLITS = ("train", "valid")
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
FORMAT = "jaxkv tokens 1"

Split = Literal["train", "valid"]


@dataclass(frozen=True)
class DataFolder:
    """A data folder as `corpus.prepare` wrote it."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def vocab(self) -> int:
        return self.manifest["vocab"]

    @property
    def digest(self) -> str:
        """A short hash of the tokenizer and the shards."""
        contents = [self.manifest["tokenizer"], self.manifest["shards"]]
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:16]

    def id_of(self, special: str) -> int:
        """The id of a special token."""
        return self.manifest["special"][special]

    def front(self, sinks: str) -> tuple[int, ...]:
        """The ids of the sink tokens before every sample, by the recipe's `sink_variant`."""
        return tuple(self.id_of(name) for name in FRONT.get(sinks, ()))

    def documents(self, split: Split) -> int:
        """Documents of a split."""
        return sum(file["documents"].get(split, 0) for file in self.manifest["files"])

    def count(self, split: Split) -> int:
        """Tokens of a split."""
        return sum(shard["tokens"] for shard in self.manifest["shards"][split])

    @cached_property
    def _maps(self) -> dict[str, tuple[list[np.ndarray], np.ndarray]]:
        """The memory-mapped shards of each split, and where each begins."""
        by_split = {}
        for split in SPLITS:
            shards = self.manifest["shards"][split]
            maps = [np.load(self.folder / shard["file"], mmap_mode="r") for shard in shards]
            by_split[split] = maps, np.cumsum([0, *map(len, maps)])
        return by_split

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
    tokens: DataFolder, split: Split, seed: int, step: int, samples: int, length: int
) -> Int32[np.ndarray, "B T"]:
    """The batch of one step: `samples` runs of `length` + 1 tokens.

    An epoch contains every run once. Each epoch has its own order and its own offset of the cuts.
    Raises UserError where the split has fewer tokens than one batch.
    """
    total = tokens.count(split)
    runs = (total - 1) // length - 1  # one run less: the offset moves the cuts by up to one
    if runs < samples:
        raise UserError(
            f"a batch of {samples} samples of {length} tokens needs {(samples + 1) * length + 1:,} "
            f"tokens, {split} has {total:,}; give more text, or set a smaller batch or length"
        )
    first = step * samples
    picked = []
    for number in range(first, first + samples):
        epoch, within = divmod(number, runs)
        offset, order = _order(seed, epoch, runs, length)
        picked.append(tokens.run(split, offset + int(order[within]) * length, length + 1))
    return np.stack(picked)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, runs: int, length: int) -> tuple[int, np.ndarray]:
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return int(random.integers(length)), random.permutation(runs).astype(np.int32)


def read(folder: Path | str) -> DataFolder:
    """Open a data folder and check it against its manifest.

    Raises UserError for another folder, and for a shard that is missing or has other contents.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"data must be a folder that `jaxkv data` made, got {folder}; make it with `jaxkv data`"
        )
    remedy = "delete the folder and create it again with `jaxkv data`"
    manifest = read_json(folder / MANIFEST, remedy)
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder} is not a data folder: no {MANIFEST} of format {FORMAT!r}; create one with "
            "`jaxkv data`"
        )
    if manifest.get("sha256") != with_checksum(manifest)["sha256"]:
        raise UserError(f"{folder / MANIFEST} was changed after `jaxkv data` wrote it; {remedy}")
    shards = [shard for split in SPLITS for shard in manifest["shards"][split]]
    for entry in ({"file": TOKENIZER, "sha256": manifest["tokenizer"]}, *shards):
        path = folder / entry["file"]
        with reading(path):
            matches = path.is_file() and sha256_of(path) == entry["sha256"]
        if not matches:
            raise UserError(
                f"{path} must be the file that {MANIFEST} describes, but is missing or another; "
                + remedy
            )
    return DataFolder(folder, manifest)


def with_checksum(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add the checksum of all other fields to a manifest."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True).encode()
    return content | {"sha256": hashlib.sha256(text).hexdigest()}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
