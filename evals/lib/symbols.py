"""Data for models that are trained on streams of symbols: each symbol is a token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxkv.models.training import corpus, data

HELD_OUT = 2  # documents for validation, the last ones


def write(
    folder: Path, symbols: Sequence[str], documents: Iterable[Sequence[int]]
) -> data.DataFolder:
    """Documents as a data folder; an existing folder is reused.

    symbols: one character each. documents: the numbers of their symbols. The vocabulary has these
    symbols only: with 192 bytes that never occur, no sink emerges.
    """
    if (folder / "tokens").exists():
        return data.read(folder / "tokens")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, document in enumerate(documents):
        paths.append(folder / f"{number:02}.txt")
        paths[-1].write_text("".join(symbols[i] for i in document), "utf-8")
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (folder / "symbols.json").write_text(json.dumps(tokenizer | {"decoder": {"type": "Fuse"}}))
    return corpus.prepare(
        paths[:-HELD_OUT], folder / "tokens", tokenizer=folder / "symbols.json",
        valid=paths[-HELD_OUT:],
    )  # fmt: skip
