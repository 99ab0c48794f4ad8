"""The tokenizer and chat template of a loaded model, as the server needs them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxkv.models.chat import Message
from jaxkv.models.llm import Llm
from jaxkv.models.text import OutputText
from jaxkv.models.tokenizer import Pieces


@dataclass(frozen=True, eq=False)
class Language:
    """name: the model name for clients. created: load time, in seconds since 1970."""

    llm: Llm
    name: str
    created: int = field(default_factory=lambda: int(time.time()))

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
        chat, tokenizer = self.llm.chat, self.llm.tokenizer
        if chat.template is None:
            return tokenizer.encode("".join(message["content"] + "\n" for message in messages))
        return tokenizer.encode(chat.render(messages), bos=False)

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
