"""How well a model predicts a text under a cache policy: the loss of every token, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, State
from jaxkv.errors import UserError
from jaxkv.typing import Array, Bool, Float, Int32, UInt32
from models.decoder import Decoder, Weights
from models.decoding import CHUNK, DEFAULT_POLICY, Static, Stream, bucket
from models.llm import Llm

# Logits of this many tokens are alive at a time: a vocabulary is often larger than a width.
_TOKENS_OF_LOGITS = 256


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _score(
    static: Static,
    weights: Weights,
    states: tuple[State, ...],
    position: UInt32[Array, ""],
    tokens: Int32[Array, "1 T"],
    targets: Int32[Array, "1 T"],
    valid: Bool[Array, "1 T"],
) -> tuple[tuple[State, ...], Array]:
    decoder = Decoder(static.config, weights, static.mesh)
    positions = position + jnp.arange(tokens.shape[1], dtype=jnp.uint32)[None, :]
    hidden, states = decoder(tokens, positions, valid, static.policies, states)
    losses = []
    for start in range(0, tokens.shape[1], _TOKENS_OF_LOGITS):
        block = slice(start, start + _TOKENS_OF_LOGITS)
        logits = decoder.logits(hidden[:, :, block])
        picked = jnp.take_along_axis(logits, targets[None, :, block], axis=0)[0]
        losses.append(jax.nn.logsumexp(logits, axis=0) - picked)
    return states, jnp.concatenate(losses, axis=1)[0]


def losses(
    llm: Llm,
    tokens: Sequence[int],
    policy: str | Policy | Sequence[Policy] = DEFAULT_POLICY,
    chunk: int = CHUNK,
    start: int = 0,
    stream: Stream | None = None,
) -> Iterator[np.ndarray]:
    """Natural-log losses of tokens 1..N-1 of one text, chunk by chunk, in a fixed memory.

    tokens: the text with its BOS in front; chunk: tokens read at a time, which changes nothing
    but the speed. start: the position of the first token, up to 2^32 - 1. stream: states to go
    on with in place of fresh ones (start is then where they stand).
    Raises UserError if there is nothing to predict.
    """
    ids = np.asarray(tokens, np.int32)
    if len(ids) < 2:
        raise UserError(f"a loss needs at least 2 tokens, got {len(ids)}; give a longer text")
    if chunk < 1:
        raise UserError(f"chunk must be at least 1, got {chunk}")
    stream = stream or Stream(llm, policy, tokens=len(ids))
    static = Static(llm.config, stream.policies, llm.mesh)
    for begin in range(0, len(ids) - 1, chunk):
        size = min(chunk, len(ids) - 1 - begin)
        width = bucket(size, chunk)
        fed = np.zeros((2, 1, width), np.int32)
        fed[0, 0, :size] = ids[begin : begin + size]
        fed[1, 0, :size] = ids[begin + 1 : begin + 1 + size]
        stream.reserve(size)
        states, loss = _score(
            static,
            llm.weights,
            stream.decoding.states,
            np.uint32((start + begin) % 2**32),
            fed[0],
            fed[1],
            np.arange(width)[None, :] < size,
        )
        stream.decoding = stream.decoding._replace(states=states)
        yield np.asarray(loss)[:size]


def encode(llm: Llm, text: str) -> list[int]:
    """A text as it is scored: one string, one BOS in front where the tokenizer has one."""
    return llm.tokenizer.encode(text, bos=True)


def mean_by_block(losses: Float[np.ndarray, " N"], size: int) -> list[dict[str, int | float]]:
    """The mean loss of each `size` predictions in a row: of tokens start to end - 1.

    losses: those of tokens 1, 2, ... as `losses` yields them.
    """
    return [
        {
            "start": start + 1,
            "end": min(start + size, len(losses)) + 1,
            "loss": float(np.mean(losses[start : start + size], dtype=np.float64)),
        }
        for start in range(0, len(losses), size)
    ]
