"""A conversation in one cache: each message adds its own tokens, and none is prefilled twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy
from jaxkv.errors import check_int
from jaxkv.models.decoding import Decoding
from jaxkv.models.llm import Llm
from jaxkv.models.streams import DEFAULT_POLICY, Stream
from jaxkv.models.text import OutputText, warn_beyond_context
from jaxkv.models.tokenizer import Pieces
from jaxkv.sampling import Sampling


class Conversation:
    """A chat between a user and a model; after every answer the cache contains the shown text.

    system: the system message. A model without a chat template gets plain lines. messages: the
    conversation so far. output: the tokens, text and finish_reason of the last answer.
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
        self.output = OutputText(llm, (), ())
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
        """Yield the answer to a message; exhaust it, or call `interrupt`, before the next one."""
        check_int("max_new_tokens", max_new_tokens)
        eos = () if ignore_eos else self.llm.eos
        self.output = OutputText(self.llm, eos, stop)
        return self._answer(self.output, text, sampling or Sampling(), max_new_tokens, eos)

    def _answer(
        self, output: OutputText, text: str, sampling: Sampling, tokens: int, eos: Sequence[int]
    ) -> Iterator[str]:
        self._interrupted = False
        self.stream.prefill([self._tokens_of(text)])
        self.stream.finish_prefill()
        # A stop string cuts the answer. The cache then returns to this state.
        before = jax.tree.map(jnp.copy, self.stream.decoding) if output.stops else None
        lengths = self.stream.lengths
        self.messages += [{"role": "user", "content": text}]
        try:
            for block in self.stream.pieces(sampling, tokens, eos):
                if piece := "".join(map(output.push, map(int, block[0]))):
                    yield piece
                if output.reason or self._interrupted:
                    break
            if piece := output.end("interrupted" if self._interrupted else "length"):
                yield piece
            if before is not None and output.reason == "stop":
                self._return_to(before, lengths, output)
        finally:  # also if the caller stops iterating: the cache contains the answer so far
            output.end("interrupted")
            self.messages += [{"role": "assistant", "content": output.text}]

    def interrupt(self) -> None:
        """End the answer in progress after the present block of tokens."""
        self._interrupted = True

    def _tokens_of(self, text: str) -> list[int]:
        """The tokens that a message adds to the cache."""
        tokenizer, chat = self.llm.tokenizer, self.llm.chat
        if chat.template is not None:
            return tokenizer.encode(chat.render_next(self.messages, text), bos=False)
        if any(message["role"] == "assistant" for message in self.messages):
            return tokenizer.encode(f"\n{text}\n", bos=False)
        return tokenizer.encode("".join(m["content"] + "\n" for m in self.messages) + text + "\n")

    def _return_to(self, before: Decoding, lengths: np.ndarray, output: OutputText) -> None:
        """Restore the cache from before the answer, and prefill the shown part of the answer."""
        pieces, text, whole_tokens, shown = Pieces(self.llm.tokenizer, start=False), "", 0, 0
        for number, token in enumerate(output.tokens, 1):
            text += pieces.push(token)
            if len(text) > len(output.text):
                break
            if not pieces.halfway:
                whole_tokens, shown = number, len(text)
        # The stop string may begin within a token: encode the text before it again.
        rest = self.llm.tokenizer.encode(output.text[shown:], bos=False)
        self.stream.decoding = before
        self.stream.lengths = lengths
        if answer := output.tokens[:whole_tokens] + rest:
            self.stream.prefill([answer])
