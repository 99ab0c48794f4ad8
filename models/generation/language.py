"""The tokenizer and chat template of a loaded model, as the server needs them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxkv.models.generation.text import OutputText
from jaxkv.models.loading.chat import Message
from jaxkv.models.loading.chat_ids import conversation_ids
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.tokenizer import Pieces


@dataclass(frozen=True, eq=False)
class Language:
    """name: the model name for clients. created: load time, in seconds since 1970.

    allow_special: added tokens that are written out in messages become their ids. Otherwise they
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
        """The variables of the chat template that a request may give."""
        return self.llm.chat.variables

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
        return conversation_ids(
            self.llm.tokenizer,
            self.llm.chat,
            messages,
            variables,
            add_generation_prompt,
            continue_final,
            self.allow_special,
        )

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
