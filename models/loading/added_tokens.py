"""Added tokens: the parts of a text that have an id each, before anything else is tokenized.

The marks of roles in a chat are added tokens. So a message that contains one as text could end
itself and begin a message of another role. `Escape` puts a character, the separator, into each of
them, and `split` finds no token across a separator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
        ending = _pattern(rests) + ("?" if "" in rests else "") if any(rests) else ""
        choices.append(re.escape(group[0][:size]) + ending)
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
    """Makes marks in a text part of the text, by separators within each.

    A template may delete parts of a text, and so join what was apart. Therefore a separator stands
    after every character with which a mark begins, and before every one with which a mark ends.

    separator: a character that no text has. texts: the marks. Those of white space stay, because
    they mark nothing, and those of one character, which cannot be divided. constants: texts for
    which the template may look. They have no separator within, except where a mark could begin or
    end, also after the template deletes other constants.
    """

    separator: str
    texts: frozenset[str]
    constants: frozenset[str] = frozenset()

    def __call__(self, text: str, beside: bool = True) -> str:
        """The text with separators.

        beside: the template may write the beginning of a mark before the text, and its end after.
        """
        if not self._marks or not text:
            return text
        escaped = self._divided(text)
        for constant, divided, kept in self._kept:
            if constant in text:
                escaped = escaped.replace(divided, kept)
        if not beside:
            return escaped
        # A template may trim a text, and a separator is no white space: the inner ones stay then.
        outer, inner = (
            self.separator * any(part in mark for mark in self._marks)
            for part in (text, text.strip() or text)
        )
        body = escaped.strip() or escaped
        before, _, after = escaped.partition(body)
        return f"{outer}{before}{inner}{body}{inner}{after}{outer}"

    @cached_property
    def _marks(self) -> list[str]:
        return [text for text in self.texts if len(text) > 1 and text.strip()]

    def _divided(self, text: str) -> str:
        """The text with every separator, also in the constants."""
        after, before = self._ends
        for letter in after:
            text = text.replace(letter, letter + self.separator)
        for letter in before:
            text = text.replace(letter, self.separator + letter)
        return text

    @cached_property
    def _ends(self) -> tuple[frozenset[str], frozenset[str]]:
        """The characters after which, and before which, a separator stands."""
        # None within the white space around a mark, because a template may trim it.
        after = {mark[0] for mark in self._marks if not mark[0].isspace()}
        after |= {mark.rstrip()[-1] for mark in self._marks if mark[-1].isspace()}
        before = {mark[-1] for mark in self._marks if not mark[-1].isspace()}
        before |= {mark.lstrip()[0] for mark in self._marks if mark[0].isspace()}
        return frozenset(after), frozenset(before)

    @cached_property
    def _kept(self) -> list[tuple[str, str, str]]:
        """Constants, as they are, with every separator, and with those that they need."""
        constants = sorted(filter(None, self.constants), key=len, reverse=True)
        ends, turned = ([text[::-1] for text in texts] for texts in (self._marks, constants))
        after, before = self._ends
        kept = []
        for text in constants:
            divided = self._divided(text)
            letters = [self.separator * (text[0] in before)] if divided != text else []
            for n, letter in enumerate(text if divided != text else "", 1):
                begins = letter in before and n > 1 and _may_begin(text[:n][::-1], ends, turned)
                goes_on = letter in after and (
                    n == len(text) or _may_begin(text[n - 1 :], self._marks, constants)
                )
                letters += [self.separator * begins, letter, self.separator * goes_on]
            if letters and (needed := "".join(letters)) != divided:
                kept.append((text, divided, needed))
        return kept


def _may_begin(text: str, marks: Iterable[str], deleted: Collection[str]) -> bool:
    """Whether a mark may begin with a text that goes on, and parts of which may be deleted.

    Always where a mark begins or ends with white space.
    """

    def fits(text: str, mark: str) -> bool:
        if not text or not mark or (text[0] == mark[0] and fits(text[1:], mark[1:])):
            return True
        return any(
            fits(text[len(part) :], mark)
            for part in deleted
            if text.startswith(part) or part.startswith(text)
        )

    if any(mark[0].isspace() or mark[-1].isspace() for mark in marks):
        return True
    heads = {mark[: len(text)] for mark in marks if mark[0] == text[0]}
    return any(fits(text[1:], head[1:]) for head in heads)


def free_characters(values: object, count: int) -> list[str]:
    """Private-use characters that no text in a value of JSON has."""
    used: set[str] = set()
    map_texts(values, used.update)
    letters = (letter for letter in map(chr, PRIVATE) if letter not in used)
    free = [letter for letter, _ in zip(letters, range(count), strict=False)]
    if len(free) < count:
        raise UserError("the messages have every private-use character; leave some out")
    return free


def map_texts(
    value: Any, change: Callable[[str], Any], rename: Callable[[str], Any] | None = None
) -> Any:
    """A value of JSON with each text replaced, also inside lists and objects.

    rename: for the names of an object; None replaces them as other texts.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        name_of = rename or change
        return {name_of(key): map_texts(entry, change, rename) for key, entry in value.items()}
    if isinstance(value, Sequence):
        return [map_texts(entry, change, rename) for entry in value]
    return value
