"""Generators of long-context tasks after RULER's definitions (Hsieh et al. 2024).

Each is a function (rng, tokenizer, length, depth) -> TaskSample. It fills a context up to `length`
tokens, to within one sentence or list item. Sentences, words and names are our own; what is asked
and how it is scored follows the paper. The paper's lengths begin at 4,096 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv.evals.tasks import haystack
from jaxkv.models.loading.tokenizer import Tokenizer


class TaskSample(NamedTuple):
    """One question about one context.

    lead: the beginning of the model's answer, with which the answer begins, as in RULER. answers:
    a right answer contains them all.
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
HOPS = 4  # assignments after the first one of a chain
COMMON, TIMES, LONG_TIMES, LONG = 10, (10, 1), (30, 3), 4096
FREQUENT, ALPHA, CODE = 3, 2.0, 6  # words asked for, exponent of their frequencies, letters
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def needle(
    rng: np.random.Generator, tokenizer: Tokenizer, length: int, depth: float = 0.5
) -> TaskSample:
    """One number in a novel (RULER: single needle in essays), at this share of the sentences."""
    thing, number = rng.choice(THINGS), _number(rng, DIGITS)
    first = int(rng.integers(len(haystack.novel())))
    fact = f"The secret number of the {thing} is {number}."
    intro = "A secret number is hidden in the following text. Remember it.\n\n"

    def build(count: int) -> str:
        sentences = haystack.cycle(haystack.novel(), first, count)
        return intro + haystack.spread(rng, sentences, [fact], depth)

    context, _ = haystack.largest(tokenizer, length, build)
    question = f"What is the secret number of the {thing} that the text mentions?"
    return TaskSample(context, question, f"The secret number of the {thing} is", (number,))


def passkey(
    rng: np.random.Generator, tokenizer: Tokenizer, length: int, depth: float = 0.5
) -> TaskSample:
    """A pass key, said twice in one place, in repeated sentences (Mohtashami and Jaggi 2023)."""
    number = _number(rng, PASSKEY_DIGITS)
    fact = f"The pass key is {number}. Keep it in mind: {number} is the pass key."
    intro = "A pass key is hidden in a lot of irrelevant text. Find it and remember it.\n\n"

    def build(count: int) -> str:
        sentences = haystack.cycle(haystack.NOISE, 0, count)
        return intro + haystack.spread(rng, sentences, [fact], depth)

    context, _ = haystack.largest(tokenizer, length, build)
    return TaskSample(context, "What is the pass key?", "The pass key is", (number,))


def variable_tracking(
    rng: np.random.Generator, tokenizer: Tokenizer, length: int, depth: float = 0.5
) -> TaskSample:
    """All names of one value: a chain of assignments, each at a place of its own; no depth."""
    names, example = _names(rng, 2 * (HOPS + 1)), _number(rng, DIGITS - 2)
    value = _number(rng, DIGITS - 2)
    while value == example:
        value = _number(rng, DIGITS - 2)
    names, example_names = names[: HOPS + 1], names[HOPS + 1 :]
    intro = "Remember the assignments of variables in the following text.\n\n"
    shown = " ".join(_chain(example_names, example))
    shown = f"{shown}\n{_question(example)}\n{_lead(example)} {', '.join(example_names)}\n\n"
    placing = int(rng.integers(2**31))

    def build(count: int) -> str:
        sentences = haystack.cycle(haystack.NOISE, 0, count)
        places = np.random.default_rng(placing)
        return intro + shown + intro + haystack.spread(places, sentences, _chain(names, value))

    context, _ = haystack.largest(tokenizer, length, build, minimum=HOPS)
    return TaskSample(context, _question(value), _lead(value), names)


def common_words(
    rng: np.random.Generator, tokenizer: Tokenizer, length: int, depth: float = 0.5
) -> TaskSample:
    """The ten words that a numbered list has most often; no depth.

    They occur 10 times each and all others once; from 4,096 tokens on 30 and 3 times, as in RULER.
    """
    often, seldom = LONG_TIMES if length >= LONG - 256 else TIMES
    intro = f"Below is a numbered list of words. Remember which {COMMON} appear most often.\n\n"
    question = f"What are the {COMMON} most common words in the list above?"
    lead = f"The {COMMON} most common words are: 1."
    said = f"{intro} {question} {lead}".lower()
    order = [word for word in map(str, rng.permutation(haystack.words())) if word not in said]
    common, rare = order[:COMMON], order[COMMON:]
    shuffling = int(rng.integers(2**31))

    def build(count: int) -> str:
        listed = common * often + _numbered(rare, count) * seldom
        listed = [str(word) for word in np.random.default_rng(shuffling).permutation(listed)]
        return intro + " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))

    context, _ = haystack.largest(tokenizer, length, build)
    return TaskSample(context, question, lead, tuple(common))


def frequent_words(
    rng: np.random.Generator, tokenizer: Tokenizer, length: int, depth: float = 0.5
) -> TaskSample:
    """The three most frequent coded words; no depth.

    Word number k occurs in proportion to k^-2. The most frequent one is dots, which do not count.
    """
    codes = ["..."]
    while len(codes) < 64:
        code = "".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=CODE))
        codes += [code] if code not in codes else []
    shuffling = int(rng.integers(2**31))
    intro = "Read the following coded text and count its words. Ignore the dots.\n\n"

    def build(count: int) -> str:
        times = [round(count * k**-ALPHA * 6 / math.pi**2) for k in range(1, len(codes) + 1)]
        listed = [code for code, n in zip(codes, times, strict=True) for _ in range(n)]
        return intro + " ".join(np.random.default_rng(shuffling).permutation(listed))

    context, _ = haystack.largest(tokenizer, length, build, minimum=100)
    question = f"What are the {FREQUENT} most frequent words in the coded text above?"
    lead = f"The {FREQUENT} most frequent words are:"
    return TaskSample(context, question, lead, tuple(codes[1 : FREQUENT + 1]))


TASKS = {
    "needle": Task(needle, 16),
    "passkey": Task(passkey, 12),
    "variable-tracking": Task(variable_tracking, 40),
    "common-words": Task(common_words, 64),
    "frequent-words": Task(frequent_words, 32),
}
BY_DEPTH = ("needle", "passkey")


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


def _names(rng: np.random.Generator, count: int) -> tuple[str, ...]:
    """Different names of five capital letters."""
    unique: dict[str, None] = {}
    while len(unique) < count:
        unique["".join(LETTERS[i].upper() for i in rng.integers(len(LETTERS), size=5))] = None
    return tuple(unique)


def _chain(names: Sequence[str], value: str) -> list[str]:
    """One sentence per assignment: the value, then name by name."""
    assigned = [value, *(f"VAR {name}" for name in names)]
    return [f"VAR {name} = {assigned[i]}." for i, name in enumerate(names)]


def _question(value: str) -> str:
    return f"Which variables have the value {value}?"


def _lead(value: str) -> str:
    return f"The {HOPS + 1} variables with the value {value} are:"


def _numbered(words: Sequence[str], count: int) -> list[str]:
    """The first `count` words; beyond all of them, with a number attached."""
    rounds = range(-(-count // len(words)))
    return [f"{word}{n or ''}" for n in rounds for word in words][:count]
