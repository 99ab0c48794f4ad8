"""The text around what a task asks for: sentences, and how many of them fill a length."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from jaxkv.errors import UserError
from jaxkv.models.loading.tokenizer import Tokenizer
from jaxkv.models.tools.passage import PASSAGE

# Repeated over and over, as in RULER's `noise` haystack.
NOISE = (
    "The river is slow.",
    "The hill is steep.",
    "The lamp is warm.",
    "We walk to the mill.",
    "Then we turn around.",
)
SHORTEST = 5  # words in a sentence of the novel


@cache
def novel() -> tuple[str, ...]:
    """The sentences of the passage that is shipped with the models, without digits and headings."""
    text = " ".join(PASSAGE.read_text("utf-8").split())
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)
    return tuple(s for s in sentences if len(s.split()) >= SHORTEST and not re.search(r"\d", s))


@cache
def words() -> tuple[str, ...]:
    """The common lower-case words of the novel of 4 to 8 letters, in alphabetic order."""
    matches = re.findall(r"(?<![\w'-])[a-z]{4,8}(?![\w'-])", PASSAGE.read_text("utf-8"))
    return tuple(sorted(set(matches)))


def cycle(sentences: Sequence[str], first: int, count: int) -> list[str]:
    """`count` sentences from number `first` on, beginning again at the end."""
    return [sentences[(first + i) % len(sentences)] for i in range(count)]


def spread(
    rng: np.random.Generator, sentences: list[str], facts: Sequence[str], depth: float | None = None
) -> str:
    """The sentences as one text, with the facts among them in their order.

    depth: where the facts stand, as a share of the sentences; None draws a place for each.
    """
    count = len(sentences)
    if depth is None:
        places = sorted(int(p) for p in rng.choice(count + 1, len(facts), replace=False))
    else:
        places = [round(depth * count)] * len(facts)
    placed = list(sentences)
    for place, fact in zip(reversed(places), reversed(facts), strict=True):
        placed.insert(place, fact)
    return " ".join(placed)


def largest(
    tokenizer: Tokenizer, length: int, build: Callable[[int], str], minimum: int = 1
) -> tuple[str, int]:
    """The longest text `build(n)` of at most `length` tokens, and its n.

    build: a text that grows with n. Raises UserError where even n = `least` is too long.
    """

    def fits(count: int) -> bool:
        return len(tokenizer.encode(build(count), bos=False)) <= length

    if not fits(minimum):
        raise UserError(
            f"the shortest context of this task has more than the {length} tokens left for it; "
            "give a larger --lengths"
        )
    low, high = minimum, 2 * minimum
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return build(low), low
