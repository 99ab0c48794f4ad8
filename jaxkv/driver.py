"""The only driver: one chunk of tokens through one layer's cache."""

from __future__ import annotations

import numpy as np

from jaxkv.arguments import check
from jaxkv.attention import merge, sink_logit
from jaxkv.contract import Chunk, Policy, Spec, State
from jaxkv.typing import Array, Bool, Float, Float32, UInt32


def step(
    policy: Policy,
    spec: Spec,
    state: State,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: UInt32[Array, "B T"],
    valid: Bool[Array, "B T"],
    sink_logits: Float[Array | np.ndarray, " N"] | None = None,
) -> tuple[Float32[Array, "B T N H"], State]:
    """Attend to cache and chunk, then absorb the chunk. Returns the output and the new state.

    q, k: after q/k norms and before rotation. positions: the index of each token in its sequence,
    from 0. valid: False on padding, whose output is 0. sink_logits: one learned logit per query
    head, merged once.
    Raises UserError where shapes disagree with each other, the spec or the state.
    """
    check(policy, spec, state, q, k, v, positions, valid, sink_logits)
    partial, state = policy.update(spec, state, Chunk(q, k, v, positions, valid))
    if sink_logits is not None:
        partial = merge(partial, sink_logit(sink_logits, partial))
    return partial.out, state
