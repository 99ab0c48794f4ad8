"""The tokenizer and chat template of a loaded model, as the server needs them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxkv.errors import UserError
from jaxkv.models.chat import Message, _variables
from jaxkv.models.llm import Llm
from jaxkv.models.text import OutputText
from jaxkv.models.tokenizer import Pieces

PRIVATE = range(0xF0000, 0x10FFFE)  # characters without a meaning


@dataclass(frozen=True, eq=False)
class Language:
    """name: the model name for clients. created: load time, in seconds since 1970.

    allow_special: special tokens that are written out in messages become their ids. Otherwise they
    are text, so that a message cannot end itself and begin one of another role.
    """

    llm: Llm
    name: str
    created: int = field(default_factory=lambda: int(time.time()))
    allow_special: bool = False

    @property
    def eos(self) -> tuple[int, ...]:
        return self.llm.eos

    @cached_property
    def longest(self) -> int:
        """The most bytes of one token."""
        return max(map(len, self.llm.tokenizer.table))

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the chat template reads."""
        template = self.llm.chat.template
        return frozenset() if template is None else _variables(template)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the BOS that the model expects before a text."""
        return self.llm.tokenizer.encode(text)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> list[int]:
        """The ids of a conversation, by default up to where the next answer begins.

        variables: more variables of the chat template. continue_final: end within the last message,
        which the answer continues. A model without a chat template takes one message of the user,
        as a plain line. Raises UserError where a template refuses the conversation.
        """
        cut, end = self._marks([*messages, variables])
        if not self.allow_special:
            # The rendering is tokenized in parts, cut at the marks. So no part has a special token
            # of a message, and those of the template stay.
            messages, variables = (
                map_texts(given, lambda text: self._special.sub(rf"\1{cut}", text))
                for given in (list(messages), variables)
            )
        if continue_final:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + end}]
            add_generation_prompt = False
        text, bos = self._text(messages, variables, add_generation_prompt)
        if continue_final:
            text, found, _ = text.rpartition(end)
            if not found:
                raise UserError("the chat template does not show the last message; send another")
        first, *others = text.split(cut)
        tokenizer = self.llm.tokenizer
        begin = () if bos is None else tokenizer.sinks  # plain text has them from the tokenizer
        ids = [*begin, *tokenizer.encode(first, bos=bos)]
        return ids + [i for part in others for i in tokenizer.encode(part, bos=False)]

    def _text(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None,
        add_generation_prompt: bool,
    ) -> tuple[str, bool | None]:
        """The text of a conversation, and whether the tokenizer adds a BOS."""
        chat = self.llm.chat
        if chat.template is not None:
            return chat.render(messages, add_generation_prompt, variables), False
        if variables or [message["role"] for message in messages] != ["user"]:
            raise UserError(
                "this model has no chat template, so it takes one message of the user and nothing "
                "else; use completions, or start the server with --chat-template"
            )
        return messages[0]["content"] + "\n", None

    def _marks(self, given: object) -> tuple[str, str]:
        """Two characters that no text has."""
        used: set[str] = set()
        map_texts(given, used.update)
        letters = (letter for letter in map(chr, PRIVATE) if letter not in used)
        marks = next(letters, None), next(letters, None)
        if None in marks:
            raise UserError("the messages have every private-use character; leave some out")
        return marks

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """The first character of each special token in a text, also where two overlap."""
        texts = "|".join(map(re.escape, self.llm.tokenizer.special_texts)) or "(?!)"
        return re.compile(f"(?=(?:{texts}))(.)", re.DOTALL)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id of a prompt adds."""
        pieces = Pieces(self.llm.tokenizer)
        return [pieces.push(token) for token in ids]

    def token_bytes(self, token: int) -> bytes:
        """One token alone, a special one written out; none for ids beyond the vocabulary."""
        table = self.llm.tokenizer.table
        return table[token] if token < len(table) else b""

    def detokenizer(
        self, stops: Sequence[str], eos: Sequence[int], min_new_tokens: int = 0
    ) -> OutputText:
        """The text of a new answer.

        min_new_tokens: the first tokens, in which no stop string is looked for.
        """
        return OutputText(self.llm, eos, stops, keep=False, min_new_tokens=min_new_tokens)


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """A value of JSON with each text replaced, also inside lists and objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): map_texts(one, change) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [map_texts(one, change) for one in value]
    return value
