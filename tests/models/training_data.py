"""A small corpus and a small recipe, for tests of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxkv.models.training import corpus, data
from jaxkv.models.training.recipes import Recipe, read_recipe

TEXT = "the cat sat on a mat and saw the dog run over the hill to see what was there in the sun"
WORDS = f"{TEXT} of that long day when nobody had come home".split()
SMALL = ("layers=1", "width=32", "heads=4", "kv_heads=2", "mlp=48", "context=16", "batch_size=8",
         "steps=12", "lr=1e-2", "log_every=1", "eval_every=6", "save_every=2",
         "valid_samples=8")  # fmt: skip
VOCAB = 300


def write_texts(folder: Path, documents: int = 6, words: int = 400, seed: int = 0) -> Path:
    """Write text files of random words."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        lines = [" ".join(rng.choice(WORDS, 8)) for _ in range(words // 8)]
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_tokens(folder: Path, vocab: int | None = VOCAB, **how) -> data.DataFolder:
    """Write a data folder of such texts. The last one is the validation text."""
    texts = sorted(write_texts(folder / "texts").glob("*.txt"))
    return corpus.prepare(texts[:-1], folder / "tokens", vocab, valid=texts[-1:], **how)


def small(*settings: str) -> Recipe:
    return read_recipe("tiny", [*SMALL, *settings])
