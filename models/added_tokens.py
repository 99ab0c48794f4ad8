"""Added tokens: the parts of a text that have an id each, before anything else is tokenized.

The marks of roles in a chat are added tokens. So a message that contains one as text could end
itself and begin a message of another role. `Escape` puts a character, the cut, into each of them,
and `split` finds no token across a cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxkv.errors import UserError

PRIVATE = range(0xF0000, 0x10FFFE)  # characters without a meaning
WORD = re.compile(r"\w")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched whole in a text.

    special: decodes to nothing. lstrip, rstrip: the white space before or after it belongs to it.
    single_word: not beside letters. normalized: looked for after all others.
    """

    text: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


TextPart = str | AddedToken


def splitter(tokens: Sequence[AddedToken]) -> Callable[[str], list[TextPart]]:
    """A function that cuts a text at added tokens as the package `tokenizers` does.

    From the left, the longest token that begins at a place; first those that are not normalized.
    """
    passes = [
        ({token.text: token for token in tokens if token.normalized == late}) for late in (0, 1)
    ]
    patterns = [(re.compile(_pattern(by_text)), by_text) for by_text in passes if by_text]

    def split(text: str) -> list[TextPart]:
        parts: list[TextPart] = [text]
        for pattern, by_text in patterns:
            parts = [
                piece
                for part in parts
                for piece in (_cut(part, pattern, by_text) if isinstance(part, str) else [part])
            ]
        return parts

    return split


def _pattern(texts: Iterable[str]) -> str:
    """An expression for the longest of some texts; its time does not grow with their number."""
    groups: dict[str, list[str]] = {}
    for text in sorted(filter(None, texts)):
        groups.setdefault(text[0], []).append(text)
    choices = []
    for group in groups.values():
        pairs = enumerate(zip(group[0], group[-1], strict=False))  # in order: these differ first
        size = next((n for n, (a, b) in pairs if a != b), len(group[0]))
        rests = [text[size:] for text in group]
        more = _pattern(rests) + ("?" if "" in rests else "") if any(rests) else ""
        choices.append(re.escape(group[0][:size]) + more)
    return f"(?:{'|'.join(choices)})"


def _cut(
    text: str, pattern: re.Pattern[str], tokens: Mapping[str, AddedToken]
) -> Iterable[TextPart]:
    at = 0
    for match in pattern.finditer(text):
        token, (start, end) = tokens[match[0]], match.span()
        beside = text[start - 1 : start] if start else "", text[end : end + 1]
        if token.single_word and any(map(WORD.match, beside)):
            continue
        if token.lstrip:
            start = max(at, len(text[:start].rstrip()))
        if token.rstrip:
            end += len(text[end:]) - len(text[end:].lstrip())
        if start > at:
            yield text[at:start]
        yield token
        at = end
    if at < len(text):
        yield text[at:]


def gguf_splitter(tokens: Sequence[AddedToken]) -> Callable[[str], list[TextPart]]:
    """The same as llama.cpp does: each token in all of the text, from the longest to the shortest.

    It has no flags (`tokenizer_st_partition` in src/llama-vocab.cpp).
    """
    in_order = sorted(tokens, key=lambda token: len(token.text.encode()), reverse=True)

    def split(text: str) -> list[TextPart]:
        parts: list[TextPart] = [text]
        for token in in_order:
            if token.text in text:
                parts = [piece for part in parts for piece in _at_each(part, token)]
        return [part for part in parts if part]

    return split


def _at_each(part: TextPart, token: AddedToken) -> Iterable[TextPart]:
    if not isinstance(part, str):
        yield part
        return
    for number, piece in enumerate(part.split(token.text)):
        if number:
            yield token
        yield piece


@dataclass(frozen=True)
class Escape:
    """Makes added tokens in a text part of the text, by a cut within each.

    cut: a character that no text has. texts: of the tokens. Tokens of white space stay, because
    they mark nothing, and those of one character, which cannot be cut. edges: the text is written
    beside others, so the beginning or end of a token in it is cut, too.
    """

    cut: str
    texts: frozenset[str]
    edges: bool = True

    def __call__(self, text: str) -> str:
        """The text with its cuts."""
        if not self._texts or not text:
            return text
        # A template may trim a text, and a cut is no white space: the inner ones stay then.
        body = text.strip() or text
        start = text.index(body)
        before, after = ([self._meets(t, side) for t in (text, body)] for side in (0, 1))
        return "".join(
            (
                self.cut * before[0] + text[:start] + self.cut * before[1],
                self._within.sub(lambda match: match[1] + self.cut, body),
                self.cut * after[1] + text[start + len(body) :] + self.cut * after[0],
            )
        )

    def _meets(self, text: str, side: int) -> bool:
        """Whether a token may begin before a text and end in it, or (side 1) the other way."""
        if not self.edges:
            return False
        if any(text in token for token in self._texts):
            return True
        parts = (text[-n:] if side else text[:n] for n in range(1, self._longest))
        return not self._halves[side].isdisjoint(parts)

    @cached_property
    def _texts(self) -> list[str]:
        return [text for text in self.texts if len(text) > 1 and text.strip()]

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._texts))

    @cached_property
    def _within(self) -> re.Pattern[str]:
        """The first character of each token in a text, also where two overlap."""
        return re.compile(f"(?={_pattern(self._texts)})(.)", re.DOTALL)

    @cached_property
    def _halves(self) -> tuple[frozenset[str], frozenset[str]]:
        """Where a token can be cut in two: all second halves, all first ones."""
        cuts = [(text[:n], text[n:]) for text in self._texts for n in range(1, len(text))]
        return frozenset(second for _, second in cuts), frozenset(first for first, _ in cuts)


def free_characters(values: object, count: int) -> list[str]:
    """Private-use characters that no text in a value of JSON has."""
    used: set[str] = set()
    map_texts(values, used.update)
    letters = (letter for letter in map(chr, PRIVATE) if letter not in used)
    free = [letter for letter, _ in zip(letters, range(count), strict=False)]
    if len(free) < count:
        raise UserError("the messages have every private-use character; leave some out")
    return free


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """A value of JSON with each text replaced, also inside lists and objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): map_texts(entry, change) for name, entry in value.items()}
    if isinstance(value, Sequence):
        return [map_texts(entry, change) for entry in value]
    return value
