"""Losses under jaxkv's policies. A prompt is read once, and each policy compresses its state.

All policies of prompt compression read a prompt with full attention, and their states have one
form. So one policy reads it that stores what any of them needs, and one program scores all
compressed prompts, padded to one size. A test compares both with the plain way.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.cache import ring
from jaxkv.contract import Policy
from jaxkv.evals.benchmarks.kvpress_cases import SINKS, WINDOW, PromptEnds
from jaxkv.models.generation.decoding import finish_prefill_layer
from jaxkv.models.loading.llm import Llm
from jaxkv.policies import ExpectedAttention, PyramidKV, SnapKV, Streaming
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import CompressedState
from jaxkv.policies.prompt_compression.expected_attention import ExpectedState
from jaxkv.typing import Float


@dataclass(frozen=True)
class PromptRecorder(ExpectedAttention):
    """Stores all tokens, the summary of the queries, and the last queries."""

    num_queries: ClassVar[int] = WINDOW


def read_prompt(llm: Llm, tokens: Sequence[int]) -> models.Stream:
    """The prompt, read exactly."""
    stream = models.Stream(llm, PromptRecorder(sinks=SINKS, start=len(tokens)), tokens=len(tokens))
    stream.prefill([tokens], len(tokens))
    return stream


def losses_of(
    chosen: Policy | tuple[Policy, ...], read: models.Stream, answer: Sequence[int]
) -> tuple[float, Float[np.ndarray, " N"]]:
    """The tokens that a policy keeps of a prompt, and the losses of answer tokens 1, 2, ...

    chosen: one policy for all layers or one per layer. read: the prompt. answer: tokens after it.
    """
    llm, size = read.llm, int(read.lengths[0])
    by_layer = llm.policies(chosen)
    states = [
        finish_prefill_layer(policy, llm.spec, None, own_state(policy, state))
        for policy, state in zip(by_layer, read.decoding.states, strict=True)
    ]
    states = [state.prompt if isinstance(state, ExpectedState) else state for state in states]
    scored = PromptEnds(0, size)
    cached = [np.isfinite(scored.cached(llm.spec, state).log_weight) for state in states]
    counts = [is_cached.sum(axis=2).mean() for is_cached in cached]
    stream = copy.copy(read)
    stream.static = read.static._replace(policies=(scored,) * len(states))
    stream.prefill_finished = True
    # Scoring takes its states, and other policies need the prompt.
    padded = jax.tree.map(jnp.copy, tuple(pad(state, size, len(answer)) for state in states))
    stream.decoding = stream.decoding._replace(states=padded)
    return float(np.mean(counts)), score(stream, answer)


def own_state(policy: Policy, read: ExpectedState) -> CompressedState | ExpectedState:
    """The state that the policy would have after the prompt."""
    if isinstance(policy, SnapKV | PyramidKV):
        return read.prompt
    queries, positions = read.prompt.queries[:, :, :0], read.prompt.query_positions[:, :0]
    bare = read.prompt._replace(queries=queries, query_positions=positions)
    return read._replace(prompt=bare) if isinstance(policy, ExpectedAttention) else bare


def pad(state: CompressedState, prompt: int, answer: int) -> CompressedState:
    """The same compressed prompt in a state whose size depends on the lengths alone."""
    missing = prompt - state.log_weight.shape[2]
    weight = jnp.pad(state.log_weight, [(0, 0), (0, 0), (0, missing)], constant_values=-jnp.inf)
    size = 1 << (prompt + answer - 1).bit_length()
    grown = ring.grow(state.dense, size)
    return state._replace(dense=grown, sample=base.resize(state.sample, prompt), log_weight=weight)


def streamed(
    chosen: Streaming, llm: Llm, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[float, Float[np.ndarray, " N"]]:
    """The same for `streaming`, which evicts while it reads."""
    stream = models.Stream(llm, chosen, tokens=len(prompt) + len(answer))
    stream.prefill([prompt])
    return float(chosen.sinks + chosen.window), score(stream, answer)


def score(stream: models.Stream, answer: Sequence[int]) -> Float[np.ndarray, " N"]:
    chunks = models.losses(stream.llm, answer, chunk=len(answer) - 1, stream=stream)
    losses = np.concatenate(list(chunks)).astype(np.float64)
    if not np.isfinite(losses).all():
        raise SystemExit(f"{stream.policies[0]} gives losses that are not finite")
    return losses
