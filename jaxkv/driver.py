"""The only driver: one chunk of tokens through one layer's cache."""

from __future__ import annotations

import jax

from jaxkv.attention import merge, sink_logit
from jaxkv.contract import Chunk, Policy, Spec, State
from jaxkv.errors import UserError
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
    Raises UserError where shapes do not agree with each other, the spec or the state.
    """
    _check(policy, spec, state, q, k, v, positions, valid)
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


def _check(
    policy: Policy, spec: Spec, state: State, q: Array, k: Array, v: Array, positions: Array,
    valid: Array,
) -> None:  # fmt: skip
    """One line instead of an error from the depth; costs nothing once compiled."""
    if not hasattr(policy, "attend"):
        raise UserError(f"a policy is a value such as jaxkv.policy('streaming'), got {policy!r}")
    if q.ndim != 4 or q.shape[1] < 1 or q.shape[2] % spec.kv_heads:
        raise UserError(
            f"q must be [B,T,N,H] with T at least 1 and N a multiple of the spec's kv_heads="
            f"{spec.kv_heads}, got {q.shape}"
        )
    rows, tokens = q.shape[:2]
    wanted = {
        "q": (q, (rows, tokens, q.shape[2], spec.head_dim)),
        "k": (k, (rows, tokens, spec.kv_heads, spec.head_dim)),
        "v": (v, (rows, tokens, spec.kv_heads, spec.head_dim)),
        "positions": (positions, (rows, tokens)),
        "valid": (valid, (rows, tokens)),
    }
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise UserError(f"{name} must be {shape} beside q {q.shape}, got {array.shape}")
    if type(state) is not type(policy.axes):
        raise UserError(
            f"the state must be one that this policy made, a {type(policy.axes).__name__}, got a "
            f"{type(state).__name__}; begin with policy.init"
        )
    held = {leaf.shape[0] for leaf in jax.tree.leaves(state)}
    if held - {rows}:
        raise UserError(
            f"the state must have as many rows as q: {rows}, got {sorted(held)}; begin with "
            f"policy.init(spec, rows={rows}, key=...)"
        )
