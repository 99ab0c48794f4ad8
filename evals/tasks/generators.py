"""Generators of long-context tasks after RULER (Hsieh et al. 2024) and LongEval (Li et al. 2023).

Each is a function (rng, tokenizer, length, depth) -> TaskSample. It fills a context up to `length`
tokens, to within one sentence or list item. Sentences, words and names are our own; what is asked
and how it is scored follows the paper. The paper's lengths begin at 4,096 tokens. These tasks stay
beside RULER's own (ruler.py), because they need no package, fill a context to its length, and place
the needle at a known depth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from jaxkv.errors import UserError
from jaxkv.models.loading.tokenizer import Tokenizer
from jaxkv.models.tools.passage import PASSAGE


class TaskSample(NamedTuple):
    """One question about one context.

    question: follows the context as it is. lead: the beginning of the model's answer, with which
    the answer begins, as in RULER. answers: what a right answer contains.
    """

    context: str
    question: str
    lead: str
    answers: tuple[str, ...]


Generator = Callable[[np.random.Generator, Tokenizer, int, float], TaskSample]


class Task(NamedTuple):
    """generate: makes a sample. tokens: maximal number of tokens of an answer."""

    generate: Generator
    tokens: int


THINGS = ("bakery", "castle", "garden", "harbor", "library", "museum", "orchard", "station")
DIGITS, PASSKEY_DIGITS = 7, 5


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


def largest(tokenizer: Tokenizer, length: int, build: Callable[[int], str]) -> str:
    """The longest text `build(n)` of at most `length` tokens.

    build: a text that grows with n, from 1 on. Raises UserError where even the first is too long.
    """

    def fits(count: int) -> bool:
        return len(tokenizer.encode(build(count), bos=False)) <= length

    if not fits(1):
        raise UserError(
            f"the shortest context of this task has more than the {length} tokens left for it; "
            "give a larger --lengths"
        )
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return build(low)


def needle(
    rng: np.random.Generator, tokenizer: Tokenizer, length: int, depth: float = 0.5
) -> TaskSample:
    """One number in a novel (RULER: single needle in essays), at this share of the sentences."""
    thing, number = rng.choice(THINGS), _number(rng, DIGITS)
    first = int(rng.integers(len(novel())))
    fact = f"The secret number of the {thing} is {number}."
    intro = "A secret number is hidden in the following text. Remember it.\n\n"

    def build(count: int) -> str:
        sentences = cycle(novel(), first, count)
        return intro + spread(rng, sentences, [fact], depth)

    context = largest(tokenizer, length, build)
    question = f"\n\nWhat is the secret number of the {thing} that the text mentions?"
    return TaskSample(context, question, f"The secret number of the {thing} is", (number,))


def passkey(
    rng: np.random.Generator, tokenizer: Tokenizer, length: int, depth: float = 0.5
) -> TaskSample:
    """A pass key, said twice in one place, in repeated sentences (Mohtashami and Jaggi 2023)."""
    number = _number(rng, PASSKEY_DIGITS)
    fact = f"The pass key is {number}. Keep it in mind: {number} is the pass key."
    intro = "A pass key is hidden in a lot of irrelevant text. Find it and remember it.\n\n"

    def build(count: int) -> str:
        sentences = cycle(NOISE, 0, count)
        return intro + spread(rng, sentences, [fact], depth)

    context = largest(tokenizer, length, build)
    return TaskSample(context, "\n\nWhat is the pass key?", "The pass key is", (number,))


def lines(
    rng: np.random.Generator, tokenizer: Tokenizer, length: int, depth: float = 0.5
) -> TaskSample:
    """A register of named lines, one of which is asked for (LongEval, Li et al. 2023).

    Names are two words of the novel. LongEval draws numbers from 1 to 50,000 and compares the last
    number of an answer. Here the numbers differ and have five digits, as a string match needs.
    """
    words = sorted({word for s in novel() for word in re.findall(r"\b[a-z]{4,7}\b", s)})
    first, second = rng.permutation(words), rng.permutation(words)
    numbers = 10_000 + rng.permutation(40_001)
    intro = "Remember the number of each line of the following register.\n\n"

    def name(i: int) -> str:
        turn, place = divmod(i, len(words))
        return f"{first[place]}-{second[(place + turn) % len(words)]}"

    def build(count: int) -> str:
        rows = (f"line {name(i)}: REGISTER_CONTENT is <{numbers[i]}>" for i in range(count))
        return intro + "\n".join(rows)

    context = largest(tokenizer, length, build)
    at = round(depth * context[len(intro) :].count("\n"))
    question = f"\n\nWhat is the REGISTER_CONTENT of line {name(at)}?"
    lead = f"The REGISTER_CONTENT of line {name(at)} is"
    return TaskSample(context, question, lead, (str(numbers[at]),))


TASKS = {
    "needle": Task(needle, 16),
    "passkey": Task(passkey, 12),
    "lines": Task(lines, 16),
}


def samples(
    name: str, tokenizer: Tokenizer, length: int, count: int, seed: int
) -> list[TaskSample]:
    """The first `count` samples of a task; each depends only on the seed and its own number."""
    number = list(TASKS).index(name)
    return [
        TASKS[name].generate(
            np.random.default_rng([seed, number, length, i]), tokenizer, length, depth_of(i)
        )
        for i in range(count)
    ]


def depth_of(number: int) -> float:
    """The depth of a sample, from 0 (beginning) to 1 (end); any first few are spread evenly."""
    return (number + 0.5) * (5**0.5 - 1) / 2 % 1


def _number(rng: np.random.Generator, digits: int) -> str:
    return str(rng.integers(10 ** (digits - 1), 10**digits))
