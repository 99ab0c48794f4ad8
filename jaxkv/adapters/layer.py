"""One layer of another library's model with a cache policy, as the adapters call it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.attention import chunked_scan
from jaxkv.contract import Chunk, Policy, Spec, State, prefill_finished
from jaxkv.errors import UserError
from jaxkv.typing import Array, Float32

CHUNK_SIZE = 256  # tokens that are computed at a time


@dataclass(frozen=True)
class PolicyLayer:
    """A policy in a layer, and how the layer attends.

    number: of the layer. seed: of policies that draw, one for all sequences, so that a sequence
    gets the same random draws in every batch. prompt: the number of tokens that are the prompt
    where a text comes without a cache, None where that is not known.
    """

    policy: Policy
    spec: Spec
    number: int
    seed: int = 0
    prompt: int | None = None

    def empty(self, batch: int, tokens: int) -> State:
        """The state before the first token, with room for `tokens` if it grows."""
        _, rng = jax.random.split(jax.random.key(self.seed))  # as in models.generation.streams
        state = self.policy.init(self.spec, 1, jax.random.fold_in(rng, self.number))
        state = jax.tree.map(lambda leaf: jnp.repeat(leaf, batch, axis=0), state)
        if self.policy.min_prompt is None:
            state = self.policy.reserve(self.spec, state, tokens)
        return state

    def extend(
        self, state: State, chunk: Chunk, tokens: int
    ) -> tuple[Float32[Array, "B T N H"], State]:
        """The output and state of a prompt, with room for `tokens` after it, or of new tokens."""
        if self.is_prompt(state):
            return self._update_prompt(state, chunk, tokens)
        return self._update(state, chunk)

    def is_prompt(self, state: State) -> bool:
        """Whether the next tokens are a prompt that the policy compresses."""
        return self.policy.min_prompt is not None and not prefill_finished(state)

    def attend(self, chunk: Chunk) -> Float32[Array, "B T N H"]:
        """The output of a text without a cache, whose beginning is the prompt."""
        batch, tokens = chunk.valid.shape
        state = self.empty(batch, tokens)
        if self.policy.min_prompt is None:
            return self._update(state, chunk)[0]
        if self.prompt is None:
            raise UserError(
                f"{type(self.policy).__name__} compresses a finished prompt, and where one ends is "
                "not known without a cache; give with_policy the number of its tokens as prompt="
            )
        end = min(self.prompt, tokens)
        start, answer = (
            Chunk(*(leaf[:, first:last] for leaf in chunk))
            for first, last in ((0, end), (end, tokens))
        )
        out, state = self._update_prompt(state, start, tokens - end)
        if end == tokens:
            return out
        return jnp.concatenate([out, self._update(state, answer)[0]], axis=1)

    def _update(self, state: State, chunk: Chunk) -> tuple[Array, State]:
        """The output, a piece at a time; a piece is computed again for gradients."""
        update = jax.checkpoint(partial(self.policy.update, self.spec))
        attended, state = chunked_scan(update, state, chunk, CHUNK_SIZE)
        return attended.out, state

    def _update_prompt(self, state: State, prompt: Chunk, tokens: int) -> tuple[Array, State]:
        """The same, of a whole prompt, with room for `tokens` after it."""
        state = self.policy.reserve(self.spec, state, prompt.valid.shape[1])
        out, state = self._update(state, prompt)
        state = self.policy.finish_prefill(self.spec, state)
        return out, self.policy.reserve(self.spec, state, tokens)
