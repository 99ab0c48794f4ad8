"""What models of the letter stream attend to and lose: measurements of the notebook on sinks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import uncached
from jaxkv.models.network.cross_entropy import target_losses
from jaxkv.models.training.data import DataFolder
from jaxkv.typing import Array, Float32, Int32

SAMPLES = 1_000  # held-out samples per measurement


def held_out(llm: Llm, tokens: DataFolder, count: int, length: int) -> Int32[np.ndarray, "B T"]:
    """Held-out samples of `length` letters, after the sink tokens that this model expects."""
    letters = tokens.run("valid", 0, count * length).reshape(count, length).astype(np.int32)
    front = np.tile(np.asarray(llm.tokenizer.front, np.int32), (count, 1))
    return np.concatenate([front, letters], axis=1)


def attention(llm: Llm, ids: Int32[Array | np.ndarray, "B T"]) -> Float32[np.ndarray, "B T S"]:
    """Attention probabilities of a model with one layer and one head."""
    inputs, attend = jnp.asarray(ids), uncached.attend_with_probabilities
    return np.asarray(uncached.forward(llm.config, llm.weights, inputs, attend)[2][0][:, 0])


def losses_by_position(llm: Llm, tokens: DataFolder) -> Float32[np.ndarray, " T"]:
    """The mean loss of held-out letters by position in a sample, in nats per letter.

    A sink token replaces the first letter of a sample, as in training. So the next letter is
    predicted without context, and if that one is a trigger, so is the letter after it.
    """
    letters = held_out(llm, tokens, SAMPLES, llm.config.context + 1)
    letters = letters[:, len(llm.tokenizer.front) :]
    inputs, targets = letters[:, :-1].copy(), jnp.asarray(letters[:, 1:])
    inputs[:, : len(llm.tokenizer.front)] = llm.tokenizer.front
    decoder, hidden, _ = uncached.forward(llm.config, llm.weights, jnp.asarray(inputs))
    return np.asarray(jnp.mean(target_losses(decoder.logits(hidden), targets), axis=0))


def attention_on_first(llm: Llm, tokens: DataFolder, triggers: np.ndarray) -> np.ndarray:
    """Mean attention of each idle letter to the first token, in descending order."""
    ids = held_out(llm, tokens, SAMPLES, llm.config.context // 2)
    on_first, late = attention(llm, ids)[:, :, 0], slice(llm.config.context // 4, None)
    idle = np.setdiff1d(ids[:, late], triggers)
    shares = [on_first[:, late][ids[:, late] == letter].mean() for letter in idle]
    return np.sort(shares)[::-1]


def attention_by_role(llm: Llm, tokens: DataFolder, triggers: np.ndarray) -> tuple[float, float]:
    """Mean attention of triggers to the letter before them, and of all other letters to themselves
    and the sink token, if there is one."""
    ids, front = held_out(llm, tokens, SAMPLES, llm.config.context // 2), len(llm.tokenizer.front)
    weights = attention(llm, ids)
    back, diagonal = (np.diagonal(weights, offset, 1, 2) for offset in (-1, 0))
    idle = diagonal + weights[:, :, 0] * front
    start = front + 1  # the first position with a letter before it
    is_trigger = np.isin(ids, triggers)[:, start:]
    return float(back[:, start - 1 :][is_trigger].mean()), float(
        idle[:, start:][~is_trigger].mean()
    )
