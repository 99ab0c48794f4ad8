"""Bytes of cache states, from shapes alone: nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import jax

from jaxkv.contract import Policy, Spec, State
from jaxkv.models.loading.llm import Llm
from jaxkv.policy_spec import state_bytes
from jaxkv.state.batch import nbytes


def sequence_bytes(llm: Llm, policy: str) -> int:
    """Bytes of one sequence in all layers, before its first token."""
    return state_bytes(llm.policies(policy), llm.spec, 1)


def streaming_window(llm: Llm, policies: Iterable[str]) -> int:
    """The smallest window of `streaming` with four sinks that takes the bytes of the largest."""
    max_bytes = max(sequence_bytes(llm, policy) for policy in policies)
    return next(w for w in count(1) if sequence_bytes(llm, streaming(w)) >= max_bytes)


def streaming(window: int) -> str:
    return f"streaming:sinks=4,window={window}"


def prefilled_bytes(policy: Policy, spec: Spec, tokens: int) -> int:
    """Bytes of one sequence in one layer after a finished prompt of this many tokens."""

    def build() -> State:
        state = policy.reserve(spec, policy.init(spec, 1, jax.random.key(0)), tokens)
        return policy.finish_prefill(spec, state)

    return nbytes(jax.eval_shape(build))
