"""The adapter of jaxkv for rates.py; one process per case."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.benchmarks import rates_llama_cpp
from jaxkv.evals.lib.timing import Variant, decode_variant, next_token, timed
from jaxkv.models.tools.budgets import bytes_of, prompt_bytes_of

QUARTERS = 4  # of a prompt


class JaxkvWorker:
    """One model under one policy, with one stream per batch size."""

    def __init__(self) -> None:
        self.products: dict[int, Variant] = {}
        self.variants: dict[tuple[int, int], Variant] = {}

    def bandwidth(self, side: int) -> dict[str, float]:
        """Bytes and seconds of a product of a square float32 matrix with a vector."""
        if side not in self.products:
            matrix, vector = jnp.ones((side, side), jnp.float32), jnp.ones((side,), jnp.float32)
            product = jax.jit(lambda m, v: m @ v)
            self.products[side] = timed(lambda: jax.block_until_ready(product(matrix, vector)))
            self.products[side]()
        return {"bytes": 4 * side**2, "seconds": self.products[side]()}

    def load(
        self,
        model: str,
        weights: str | None,
        policy: str,
        prompts: Sequence[Sequence[int]],
        new: int = 0,
        scored: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        """Load a model in float32, or with int8 weights.

        prompts: to decode `new` tokens from. scored: return the losses of the first one, too.
        """
        self.llm = models.load(model, "float32", weights=weights)
        self.policy, self.prompts = policy, prompts
        length = len(prompts[0])
        losses = models.score(self.llm, prompts[0], policy).losses if scored else []
        return {
            "losses": [float(np.mean(x)) for x in np.array_split(losses, QUARTERS) if len(x)],
            "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self.llm.weights)),
            "cores": len(os.sched_getaffinity(0)),
            "cache": {"prompt": prompt_bytes_of(self.llm, policy, length),
                      "decoding": bytes_of(self.llm, policy, length, new)},
        }  # fmt: skip

    def prefill(self, tokens: Sequence[int]) -> dict[str, float]:
        """Seconds to read a prompt into an empty cache, up to the most probable next token."""
        return {"seconds": timed(partial(next_token, self.llm, tokens, self.policy))()}

    def decode(self, batch: int, new: int) -> dict[str, float]:
        """Seconds to generate tokens for the first sequences, after their prompts."""
        if (batch, new) not in self.variants:
            prompts = self.prompts[:batch]
            longest = max(map(len, prompts))
            stream = models.Stream(self.llm, self.policy, batch, tokens=longest + new)
            stream.prefill(prompts)
            stream.finish_prefill()
            self.variants[batch, new] = decode_variant(stream, new)
        return {"seconds": self.variants[batch, new]()}

    def greedy(self, batch: int, new: int) -> dict[str, list[list[int]]]:
        """The tokens that `decode` generates."""
        prompts = [list(prompt) for prompt in self.prompts[:batch]]
        answers = models.generate(
            self.llm, prompts, self.policy, new, sampling=models.Sampling(), ignore_eos=True
        )
        return {"tokens": [np.asarray(answer.tokens).tolist() for answer in answers]}

    def memory(self) -> dict[str, int]:
        return rates_llama_cpp.memory()


if __name__ == "__main__":
    rates_llama_cpp.serve(JaxkvWorker())
