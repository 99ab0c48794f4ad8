"""What a program of the engine returns for each token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.typing import Array, Bool, Float32, Int32

MAX_LOGPROBS = 20  # likeliest tokens that a request may ask for


class StepOutput(NamedTuple):
    """The output of a step for M sequences, or for M prompt tokens.

    token, logprob: each token and its log probability. top, top_logprobs: the likeliest tokens and
    theirs. finite: whether the logits were finite.
    """

    token: Int32[Array, " M"]
    logprob: Float32[Array, " M"]
    top: Int32[Array, "M 20"]
    top_logprobs: Float32[Array, "M 20"]
    finite: Bool[Array, " M"]


def score(
    logits: Float32[Array, "M V"], token: Int32[Array, " M"], scored: Bool[Array, ""] | bool
) -> StepOutput:
    """The tokens with their log probabilities, which are computed only if `scored`."""

    def compute() -> tuple[Array, Array, Array]:
        logprobs = jax.nn.log_softmax(logits)
        best, top = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
        logprob = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
        return logprob, top.astype(jnp.int32), best

    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(compute))
    logprob, top, best = jax.lax.cond(scored, compute, lambda: nothing)
    return StepOutput(token, logprob, top, best, jnp.isfinite(jnp.max(logits, axis=1)))
