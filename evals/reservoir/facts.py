"""Streams of facts for associative recall: a name with a value, asked several times later.

Random letters stand between facts. A question is the name alone; the answer is the fact. A name
gets another value only after the last question about the old one. A fact is a single token, so that
one layer can find it: models this small did not learn facts of two tokens in 14 million tokens.
"""

from __future__ import annotations

import json
import math
from functools import cache
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from jaxkv.models.training import corpus, data

NAMES, VALUES, LETTERS = 128, 8, 4
FIRST_NAME, FIRST_LETTER = NAMES * VALUES, NAMES * VALUES + NAMES  # facts are the first tokens
SYMBOLS = [chr(0x4E00 + i) for i in range(FIRST_LETTER + LETTERS)]
TIMES = 4  # occurrences of a fact
DOCUMENTS, LENGTH, HELD_OUT = 22, 200_000, 2  # the last documents are for validation
FARTHEST = 420  # maximal distance of two occurrences in training, in tokens


def stream(length: int, seed: int) -> list[int]:
    """Facts and their repetitions. Distances are log-uniform in a third of them, from which a model
    learns first, and uniform in the others."""
    random, tokens = np.random.default_rng(seed), []
    unused, due = list(map(int, random.permutation(NAMES))), []

    def say(fact: int, times_left: int) -> None:
        if times_left:
            gap = random.uniform(math.log(3), math.log(FARTHEST))
            gap = math.exp(gap) if random.random() < 1 / 3 else random.uniform(3, FARTHEST)
            heappush(due, (len(tokens) + int(gap), fact, times_left))
        else:
            unused.insert(int(random.integers(len(unused) // 2 + 1)), fact // VALUES)
        tokens.append(fact)

    while len(tokens) < length:
        tokens += letters(random, random.integers(0, 3))
        if due and due[0][0] <= len(tokens):
            _, fact, times_left = heappop(due)
            tokens.append(FIRST_NAME + fact // VALUES)
            say(fact, times_left - 1)
        elif unused:
            say(unused.pop() * VALUES + int(random.integers(VALUES)), TIMES - 1)
    return tokens[:length]


def letters(random: np.random.Generator, count: int) -> list[int]:
    return (FIRST_LETTER + random.integers(0, LETTERS, count)).tolist()


@cache  # every policy gets the same questions
def question(
    length: int, distances: tuple[int, ...], seed: tuple[int, ...], facts: bool = True
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A stream of `length` tokens, and for each distance a fact this many tokens before its end.

    Their names have no other fact. facts: whether the stream contains other facts.
    """
    random = np.random.default_rng(seed)
    names = random.permutation(NAMES)
    asked, other_names = names[: len(distances)], names[len(distances) :]
    answers = asked * VALUES + random.integers(VALUES, size=len(asked))
    tokens = np.array(
        stream(length, int(random.integers(2**31))) if facts else letters(random, length)
    )
    renamed = np.arange(NAMES)
    renamed[asked] = random.choice(other_names, len(asked), replace=False)
    is_fact, is_name = tokens < FIRST_NAME, (tokens >= FIRST_NAME) & (tokens < FIRST_LETTER)
    of_fact = renamed[np.where(is_fact, tokens, 0) // VALUES] * VALUES + tokens % VALUES
    of_name = FIRST_NAME + renamed[np.where(is_name, tokens - FIRST_NAME, 0)]
    tokens = np.where(is_fact, of_fact, np.where(is_name, of_name, tokens))
    tokens[-np.array(distances)] = answers
    return tuple(tokens.tolist()), tuple(answers.tolist())


def write(folder: Path) -> data.DataFolder:
    """The streams as a data folder, a character and a token per symbol; an existing one is reused.

    The vocabulary has these symbols only: with 192 bytes that never occur, no sink emerges.
    """
    if (folder / "tokens").exists():
        return data.read(folder / "tokens")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:02}.txt" for number in range(DOCUMENTS)]
    for number, path in enumerate(paths):
        path.write_text("".join(SYMBOLS[i] for i in stream(LENGTH, number)), "utf-8")
    vocab = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (folder / "symbols.json").write_text(json.dumps(tokenizer | {"decoder": {"type": "Fuse"}}))
    return corpus.prepare(
        paths[:-HELD_OUT], folder / "tokens", tokenizer=folder / "symbols.json",
        valid=paths[-HELD_OUT:],
    )  # fmt: skip
