"""Bigram-backcopy streams (Guo et al. 2024, arXiv 2410.13835): data on which a head is mostly idle.

Letters follow a Markov chain, except for a few triggers: the letter after a trigger copies the one
before it. A copying head is idle at every other letter. The recipe for this data is the preset
`backcopy`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxkv.models.training import corpus, data
from jaxkv.typing import Float

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"
TRIGGERS = 20  # of the letters, the most frequent ones
SPREAD = 0.3  # of the Dirichlet distribution that each letter's successors are drawn from
DOCUMENTS, LENGTH = 26, 100_000  # the last two documents are held out


@dataclass(frozen=True)
class LetterChain:
    """The distribution of the stream: successors of each letter, and the triggers."""

    seed: int

    @property
    def follows(self) -> Float[np.ndarray, "V V"]:
        random = np.random.default_rng(self.seed)
        return random.dirichlet(np.full(len(LETTERS), SPREAD), size=len(LETTERS))

    @property
    def triggers(self) -> np.ndarray:
        return np.argsort(-self.follows.sum(0))[:TRIGGERS]

    def letters(self, count: int, seed: int) -> np.ndarray:
        """A stream of letter ids."""
        chance = np.random.default_rng([self.seed, seed]).random(count)
        ends, triggers = np.cumsum(self.follows, axis=1), set(self.triggers.tolist())
        # Two triggers in a row would alternate for ever, so the first letter is no trigger.
        before = last = next(i for i in range(len(LETTERS)) if i not in triggers)
        stream = []
        for x in chance:
            new = before if last in triggers else int(np.searchsorted(ends[last], x))
            before, last = last, min(new, len(LETTERS) - 1)
            stream.append(last)
        return np.array(stream)

    def floor(self, letters: np.ndarray) -> float:
        """The lower bound of the mean loss: zero after a trigger, else that of the chain."""
        after_trigger = np.isin(letters[:-1], self.triggers)
        chances = self.follows[letters[:-1], letters[1:]]
        return float(np.where(after_trigger, 0.0, -np.log(np.maximum(chances, 1e-300))).mean())


def write(chain: LetterChain, folder: Path) -> data.DataFolder:
    """The stream as a data folder; an existing folder is reused."""
    if (folder / "tokens").exists():
        return data.read(folder / "tokens")
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    paths = [texts / f"{number:02}.txt" for number in range(DOCUMENTS)]
    for number, path in enumerate(paths):
        path.write_text("".join(LETTERS[i] for i in chain.letters(LENGTH, number)))
    # A vocabulary of these letters only: with 192 bytes that never occur, no sink emerges.
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    vocab = {letter: number for number, letter in enumerate(LETTERS)}
    letters = {"model": {"type": "BPE", "vocab": vocab, "merges": []}}
    letters |= {"version": "1.0", "pre_tokenizer": by_byte, "decoder": by_byte}
    (folder / "letters.json").write_text(json.dumps(letters))
    return corpus.prepare(
        paths[:-2], folder / "tokens", tokenizer=folder / "letters.json", valid=paths[-2:]
    )
