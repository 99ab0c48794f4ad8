"""The only driver: one chunk of tokens through one layer's cache."""

from __future__ import annotations

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
    sink: Float[Array, " N"] | None = None,
) -> tuple[Float32[Array, "B T N H"], State]:
    """Attend to everything in view, absorb the chunk; the attention output and the new state.

    q, k after q/k norms and before rotation. positions count each row's tokens from 0; valid is
    False on padding, whose output is 0. sink: one learned sink logit a query head, added once.
    """
    chunk = Chunk(q, k, v, positions, valid)
    if q.shape[1] == 1 and hasattr(policy, "decode"):
        partial, state = policy.decode(spec, state, chunk)
    elif getattr(policy, "needs_scores", False):
        partial, scores = policy.attend(spec, state, chunk)
        state = policy.extend(spec, state, chunk, scores=scores)
    else:
        partial = policy.attend(spec, state, chunk)
        state = policy.extend(spec, state, chunk)
    if sink is not None:
        partial = merge(partial, sink_logit(sink, partial))
    return partial.out, state
