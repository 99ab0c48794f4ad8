"""A conversation in one cache: each turn feeds its own text, and nothing is read twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy
from jaxkv.errors import whole
from jaxkv.models.decoding import Decoding
from jaxkv.models.llm import Llm
from jaxkv.models.streams import DEFAULT_POLICY, Stream
from jaxkv.models.text import Row, warn_beyond_context
from jaxkv.models.tokenizer import Pieces
from jaxkv.sampling import Sampling


class Conversation:
    """A user and a model in turns. Behind every answer the cache holds exactly what was shown.

    system: what the model is told first. A model without a chat template reads plain lines.
    messages: what was said so far. row: the tokens, text and finish_reason of the last answer.
    """

    def __init__(
        self,
        llm: Llm,
        policy: str | Policy | Sequence[Policy | str] = DEFAULT_POLICY,
        system: str | None = None,
        seed: int = 0,
    ):
        self.llm = llm
        self.stream = Stream(llm, policy, seed=seed)
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.row = Row(llm, (), ())
        self._interrupted = self._warned = False
        warn_beyond_context(llm, self.stream.policies, None)

    def say(
        self,
        text: str,
        sampling: Sampling | None = None,
        max_new_tokens: int = 512,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Iterator[str]:
        """The answer to a message as it comes; exhaust it, or call `interrupt`, before the next."""
        whole("max_new_tokens", max_new_tokens)
        eos = () if ignore_eos else self.llm.eos
        self.row = Row(self.llm, eos, stop)
        return self._answer(self.row, text, sampling or Sampling(), max_new_tokens, eos)

    def _answer(
        self, row: Row, text: str, sampling: Sampling, tokens: int, eos: Sequence[int]
    ) -> Iterator[str]:
        self._interrupted = False
        self.stream.read([self._turn(text)])
        self.stream.seal()
        # Where a stop string is given the answer is cut, and so must the cache be: go back here.
        held = jax.tree.map(jnp.copy, self.stream.decoding) if row.stops else None
        lengths = self.stream.lengths
        self.messages += [{"role": "user", "content": text}]
        try:
            for block in self.stream.pieces(sampling, tokens, eos):
                if piece := "".join(map(row.push, map(int, block[0]))):
                    yield piece
                if row.reason or self._interrupted:
                    break
            if piece := row.end("interrupted" if self._interrupted else "length"):
                yield piece
            if held is not None and row.reason == "stop":
                self._return_to(held, lengths, row)
        finally:  # also where nobody listens to the end: the cache holds it all the same
            row.end("interrupted")
            self.messages += [{"role": "assistant", "content": row.text}]

    def interrupt(self) -> None:
        """End the answer in progress with the tokens that are being made."""
        self._interrupted = True

    def _turn(self, text: str) -> list[int]:
        """The tokens that a message adds to the cache."""
        tokenizer, chat = self.llm.tokenizer, self.llm.chat
        if chat.template is not None:
            return tokenizer.encode(chat.turn(self.messages, text), bos=False)
        if any(message["role"] == "assistant" for message in self.messages):
            return tokenizer.encode(f"\n{text}\n", bos=False)
        return tokenizer.encode("".join(m["content"] + "\n" for m in self.messages) + text + "\n")

    def _return_to(self, held: Decoding, lengths: np.ndarray, row: Row) -> None:
        """The cache as it was before the answer, and then what was shown of it."""
        pieces, text, kept, shown = Pieces(self.llm.tokenizer, start=False), "", 0, 0
        for number, token in enumerate(row.tokens, 1):
            text += pieces.push(token)
            if len(text) > len(row.text):
                break
            if not pieces.halfway:
                kept, shown = number, len(text)
        # Where the stop string begins within a token, the rest of the text is written anew.
        rest = self.llm.tokenizer.encode(row.text[shown:], bos=False)
        self.stream.decoding = held
        self.stream.lengths = lengths
        if answer := row.tokens[:kept] + rest:
            self.stream.read([answer])
