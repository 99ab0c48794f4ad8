"""The tokenizer and chat template of a loaded model, as the server needs them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxkv.errors import UserError
from jaxkv.models.chat import Message
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

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the BOS that the model expects before a text."""
        return self.llm.tokenizer.encode(text)

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to where the next answer begins.

        A model without a chat template gets plain lines. Raises UserError where a template
        refuses the conversation.
        """
        messages, cut = self._cut_special(messages)
        chat, tokenizer = self.llm.chat, self.llm.tokenizer
        if chat.template is None:
            text, bos, begin = "".join(m["content"] + "\n" for m in messages), None, ()
        else:
            text, bos, begin = chat.render(messages), False, tokenizer.sinks
        first, *others = text.split(cut) if cut else [text]
        ids = [*begin, *tokenizer.encode(first, bos=bos)]
        return ids + [i for part in others for i in tokenizer.encode(part, bos=False)]

    def _cut_special(self, messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
        """The messages with a mark inside each special token, and the mark; empty without any.

        The rendering is tokenized in parts, cut at the marks. So no part has a special token of a
        message, and those of the template stay.
        """
        contents = [message["content"] for message in messages]
        if self.allow_special or not any(map(self._special.search, contents)):
            return messages, ""
        used = set().union(*contents)
        mark = next((letter for letter in map(chr, PRIVATE) if letter not in used), None)
        if mark is None:
            raise UserError("the messages have every private-use character; leave some out")
        cut = [self._special.sub(rf"\1{mark}", content) for content in contents]
        pairs = zip(messages, cut, strict=True)
        return [{**message, "content": content} for message, content in pairs], mark

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """The first character of each special token in a text, also where two overlap."""
        texts = "|".join(map(re.escape, self.llm.tokenizer.special_texts))
        return re.compile(f"(?=(?:{texts}))(.)" if texts else "(?!)", re.DOTALL)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id of a prompt adds."""
        pieces = Pieces(self.llm.tokenizer)
        return [pieces.push(token) for token in ids]

    def token_bytes(self, token: int) -> bytes:
        """One token alone, a special one written out; none for ids beyond the vocabulary."""
        table = self.llm.tokenizer.table
        return table[token] if token < len(table) else b""

    def detokenizer(self, stops: Sequence[str], eos: Sequence[int]) -> OutputText:
        """The text of a new answer."""
        return OutputText(self.llm, eos, stops, keep=False)
