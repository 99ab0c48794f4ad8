"""A conversation in one cache: each message adds its own tokens, and none is prefilled twice."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import defaults
from jaxkv.contract import Policy
from jaxkv.errors import UserError, check_int, check_text
from jaxkv.models.generation.decoding import Decoding
from jaxkv.models.generation.streams import ROOM, Stream
from jaxkv.models.generation.text import (
    OutputText,
    check_prompt_within_context,
    sampling_for,
    warn_beyond_context,
    warn_if_grown_beyond_context,
)
from jaxkv.models.loading.chat import next_turn_ids
from jaxkv.models.loading.compilation import Stopwatch
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.tokenizer import Pieces
from jaxkv.sampling import Sampling

# Padded lengths of messages in tokens, one per program. A longer message is prefilled in parts of
# the last length, so it compiles nothing more.
MESSAGE_LENGTHS = (16, 64, 256)


class Conversation:
    """A chat between a user and a model; after every answer the cache contains the shown text.

    system: the system message. A model without a chat template gets plain lines. messages: the
    conversation so far. output: the tokens, text and reason of the last answer. seconds: the
    time of decoding them, without compiling.
    """

    def __init__(
        self,
        llm: Llm,
        policy: str | Policy | Sequence[Policy | str] = defaults.POLICY,
        system: str | None = None,
        seed: int = 0,
    ):
        self.llm, self.policy, self.seconds = llm, policy, 0.0
        self.stream = Stream(llm, policy, seed=seed)
        _make_room(self.stream)
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.output = OutputText(llm, (), ())
        self._interrupted = self._warned = False
        warn_beyond_context(llm, self.stream.policies, None)

    @property
    def position(self) -> int:
        """The number of tokens of the conversation so far, cached or evicted."""
        return int(np.asarray(self.stream.decoding.position)[0])  # indexing would compile

    @property
    def tokens_per_second(self) -> float:
        """The speed of decoding of the last answer."""
        return self.output.count / max(self.seconds, 1e-9)

    def compile_ahead(self, sampling: Sampling | None = None, ignore_eos: bool = False) -> None:
        """Start to compile what turns need, in other threads; the weights may still be shapes."""
        sampling, eos = sampling_for(self.llm, sampling), () if ignore_eos else self.llm.eos
        with contextlib.suppress(UserError):  # a policy whose maximum is below these lengths
            self.stream.compile_ahead(MESSAGE_LENGTHS, sampling, eos)

    def warm_up(
        self,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile everything that turns need, so that none waits for it.

        Runs messages of all MESSAGE_LENGTHS on a cache that is then dropped, and a second turn if
        the policy compresses or indexes the first. A growing cache compiles again after each ROOM
        tokens or more, when it grows.
        progress: called with (programs compiled, all programs).
        """
        sampling, eos = sampling_for(self.llm, sampling), () if ignore_eos else self.llm.eos
        self.compile_ahead(sampling, ignore_eos)
        self.stream.ahead.wait_all(progress)
        # What is refused here, as for a small maximum or little memory, a turn refuses again.
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(UserError):
            self._rehearse(Stream(self.llm, self.policy), sampling, eos)

    def _rehearse(self, stream: Stream, sampling: Sampling, eos: Sequence[int]) -> None:
        compresses = any(policy.min_prompt is not None for policy in stream.policies)
        for _ in range(1 + compresses):
            for length in MESSAGE_LENGTHS:
                with contextlib.suppress(UserError):
                    self._prefill(stream, [0] * length)
            stream.finish_prefill()
            _make_room(stream)
            jax.tree.map(jnp.copy, stream.decoding)  # as before an answer with stop strings
            stream.decode(sampling, 1, eos)

    def say(
        self,
        text: str,
        sampling: Sampling | None = None,
        max_new_tokens: int = 512,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Iterator[str]:
        """Yield the answer to a message; exhaust it, or call `interrupt`, before the next one.

        The first `next` raises UserError for a message that would end beyond the trained context
        under a growing cache; the conversation then stays as it was.
        """
        check_text("text", text)
        check_int("max_new_tokens", max_new_tokens)
        eos = () if ignore_eos else self.llm.eos
        self.output = OutputText(self.llm, eos, stop)
        sampling = sampling_for(self.llm, sampling)
        return self._answer(self.output, text, sampling, max_new_tokens, eos)

    def _answer(
        self, output: OutputText, text: str, sampling: Sampling, tokens: int, eos: Sequence[int]
    ) -> Iterator[str]:
        self._interrupted, self.seconds = False, 0.0
        message = self._tokens_of(text)
        end = int(self.stream.lengths[0]) + len(message)
        check_prompt_within_context(self.llm, self.stream.policies, end)
        self._prefill(self.stream, message)
        self.stream.finish_prefill()
        _make_room(self.stream)
        self._warn_beyond_context()
        # A stop string cuts the answer. The cache then returns to this state.
        before = jax.tree.map(jnp.copy, self.stream.decoding) if output.stops else None
        lengths = self.stream.lengths
        self.messages += [{"role": "user", "content": text}]
        try:
            for block in self._timed(self.stream.decode_blocks(sampling, tokens, eos)):
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
            self._warn_beyond_context()

    def _prefill(self, stream: Stream, tokens: Sequence[int]) -> None:
        _make_room(stream, len(tokens))
        stream.prefill([tokens], min(MESSAGE_LENGTHS[-1], stream.chunk_of(None)))

    def _timed(self, blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """The same blocks; adds the seconds of computing them to `seconds`."""
        jax.block_until_ready(self.stream.decoding.logits)
        while True:
            watch = Stopwatch()
            with watch.running():
                block = next(blocks, None)
            self.seconds += watch.seconds
            if block is None:
                return
            yield block

    def _warn_beyond_context(self) -> None:
        """Warn once that a growing cache is longer than the trained context."""
        self._warned = self._warned or warn_if_grown_beyond_context(self.stream)

    def interrupt(self) -> None:
        """End the answer in progress after the present block of tokens."""
        self._interrupted = True

    def _tokens_of(self, text: str) -> list[int]:
        """The tokens that a message adds to the cache."""
        llm, begins = self.llm, self.position == 0
        return next_turn_ids(llm.tokenizer, llm.chat, self.messages, text, begins)

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
        rest = self.llm.tokenizer.encode(output.text[shown:], bos=False, start=False)
        self.stream.decoding = before
        self.stream.lengths = lengths
        if answer := output.tokens[:whole_tokens] + rest:
            self._prefill(self.stream, answer)


def _make_room(stream: Stream, tokens: int = 0) -> None:
    """Let growing caches grow in steps of ROOM tokens, because each growth compiles again."""
    after = int(stream.prompt_lengths[0])  # tokens that the policy no longer counts
    steps = -(-(int(stream.lengths[0]) - after + tokens + 1) // ROOM)
    # Where a step exceeds a maximum or the memory, the cache grows by what a turn needs, if it can.
    with contextlib.suppress(UserError):
        stream.reserve(0, room=after + steps * ROOM)
