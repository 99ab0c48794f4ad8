"""Ids of a text that is cut at its added tokens, by the package `tokenizers` in one call.

The parts of a text are not encoded apart, because what begins a text differs from what goes on. A
second tokenizer shares the model. It has the same added tokens under names of private characters
that do not occur in the text. So it finds those where the text was cut, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from jaxkv.errors import UserError
from jaxkv.models.loading import added_tokens
from jaxkv.models.loading.added_tokens import FLAGS, AddedToken, TextPart, free_characters

# Letters that a text may continue: the first that shares no token with the text is taken.
BEFORE = ("\n", "a", ".", "0")


@dataclass(frozen=True, eq=False)
class PackageCoder:
    """backend: the tokenizer of the package. added: its added tokens."""

    backend: Any
    added: tuple[AddedToken, ...]
    _named: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_named", lru_cache(maxsize=4)(self._with_names))

    def ids(self, parts: Sequence[TextPart], start: bool) -> list[int]:
        """The ids of a text, cut at its added tokens; start: it begins a text.

        No added token comes from the text between them, except of one character or of white space.
        """
        name, before = free_characters([part for part in parts if isinstance(part, str)], 2)
        backend, by_id = self._named(name)
        names = {token: f"{name}{token.id}{name}" for token in self.added}
        text = "".join(part if isinstance(part, str) else names[part] for part in parts)
        ids = self._continued(backend, text, before) if not start else _encode(backend, text)
        out: list[int] = []
        for i in ids:
            out += [by_id[i]] if i in by_id else self._as_text(i) if i in self._forgeable else [i]
        return out

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text, cut by the package."""
        return _encode(self.backend, text)

    def _with_names(self, name: str) -> tuple[Any, Mapping[int, int]]:
        import tokenizers

        backend = tokenizers.Tokenizer(self.backend.model)
        if self.backend.normalizer is not None:
            backend.normalizer = self.backend.normalizer
        if self.backend.pre_tokenizer is not None:
            backend.pre_tokenizer = self.backend.pre_tokenizer
        names = {f"{name}{token.id}{name}": token for token in self.added}
        # `splitter` leaves normalized ones to the package with the white space beside them.
        flags = {
            text: {flag: getattr(token, flag) for flag in FLAGS}
            if token.normalized and backend.normalizer is not None
            else {"normalized": False}
            for text, token in names.items()
        }
        backend.add_tokens([tokenizers.AddedToken(text, **flags[text]) for text in names])
        return backend, {backend.token_to_id(text): token.id for text, token in names.items()}

    def _continued(self, backend: Any, text: str, before: str) -> list[int]:
        """The ids of a text that goes on: no space is put before it."""
        if not self._begins:
            return _encode(backend, text)
        for letter in (before, *BEFORE):
            front, ids = _encode(backend, letter), _encode(backend, letter + text)
            if front and ids[: len(front)] == front:
                return ids[len(front) :]
        raise UserError(f"this tokenizer cannot continue a text with {text!r:.60}; begin another")

    @cached_property
    def _begins(self) -> bool:
        """Whether a text is changed where it begins."""
        normalizer, splits = self.backend.normalizer, self.backend.pre_tokenizer
        text = "x" if normalizer is None else normalizer.normalize_str("x")
        pieces = [(text, None)] if splits is None else splits.pre_tokenize_str(text)
        return "".join(piece for piece, _ in pieces) != "x"

    @cached_property
    def _forgeable(self) -> frozenset[int]:
        """Added tokens that the model may have in its vocabulary, too."""
        texts = (token for token in self.added if len(token.text) > 1 and token.text.strip())
        return frozenset(token.id for token in texts)

    def _as_text(self, i: int) -> list[int]:
        """The ids of an added token's text, without this token: divided until none is left."""
        text = self.backend.model.id_to_token(i)
        halves = [
            token.id for half in (text[:1], text[1:]) for token in self.backend.model.tokenize(half)
        ]
        return [
            j
            for half in halves
            for j in (self._as_text(half) if half in self._forgeable else [half])
        ]


def splitter(backend: Any, tokens: Sequence[AddedToken]) -> Callable[[str, bool], list[TextPart]]:
    """A function that cuts a text at its added tokens; its second argument: the text begins.

    The package looks for normalized tokens in a normalized text, where it also normalizes the
    tokens. After a normalizer that puts a space before a text, it finds them only after a space and
    where a text begins. A text that only normalization turns into a token is not cut.
    """
    late = [token for token in tokens if token.normalized and backend.normalizer is not None]
    split = added_tokens.splitter([token for token in tokens if token not in late])
    if not late:
        return lambda text, start: split(text)
    import tokenizers

    finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
    finder.normalizer = backend.normalizer
    finder.add_tokens(
        [tokenizers.AddedToken(t.text, **{flag: getattr(t, flag) for flag in FLAGS}) for t in late]
    )
    by_id = {finder.token_to_id(token.text): token for token in late}

    def split_normalized(text: str, begins: bool) -> Iterator[TextPart]:
        front, at = "" if begins else ".", 0  # neither a letter nor white space
        encoding = finder.encode(front + text, add_special_tokens=False)
        for i, (first, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token = by_id.get(i)
            begin = (
                -1
                if token is None
                else text.find(token.text, max(at, first - len(front)), end - len(front))
            )
            if begin >= 0:
                yield from (text[at:begin], token)
                at = begin + len(token.text)
        yield text[at:]

    def split_all(text: str, start: bool) -> list[TextPart]:
        parts = []
        for number, part in enumerate(split(text)):
            if isinstance(part, str) and any(token.text in part for token in late):
                parts += split_normalized(part, start or number > 0)
            else:
                parts.append(part)
        return parts

    return split_all


def _encode(backend: Any, text: str) -> list[int]:
    # The fast variant keeps no offsets: half the time and half the memory on a whole book.
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
