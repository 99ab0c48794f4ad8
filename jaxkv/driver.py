"""The only driver: one chunk of tokens through one layer's cache."""

from __future__ import annotations

import jax
import numpy as np

from jaxkv.attention import merge, sink_logit
from jaxkv.contract import Chunk, Policy, Spec, State, is_letters
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
    sink: Float[Array | np.ndarray, " N"] | None = None,
) -> tuple[Float32[Array, "B T N H"], State]:
    """Attend to everything in view, absorb the chunk; the attention output and the new state.

    q, k after q/k norms and before rotation. positions count each row's tokens from 0; valid is
    False on padding, whose output is 0. sink: one learned sink logit a query head, added once.
    Raises UserError where shapes do not agree with each other, the spec or the state.
    """
    check(policy, spec, state, q, k, v, positions, valid, sink)
    chunk = Chunk(q, k, v, positions, valid)
    fused = getattr(policy, "decode" if q.shape[1] == 1 else "take", None)
    if fused is not None:
        partial, state = fused(spec, state, chunk)
    elif getattr(policy, "needs_scores", False):
        partial, scores = policy.attend(spec, state, chunk)
        state = policy.extend(spec, state, chunk, scores=scores)
    else:
        partial = policy.attend(spec, state, chunk)
        state = policy.extend(spec, state, chunk)
    if sink is not None:
        partial = merge(partial, sink_logit(sink, partial))
    return partial.out, state


def check(
    policy: object,
    spec: Spec,
    state: object,
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    valid: Array,
    sink: Array | np.ndarray | None = None,
) -> None:
    """Raise UserError for arguments of `step` that do not agree; costs nothing once compiled."""
    if isinstance(policy, type) or not hasattr(policy, "attend"):
        raise UserError(f"a policy is a value such as jaxkv.policy('streaming'), got {policy!r}")
    if q.ndim != 4 or q.shape[1] < 1 or q.shape[2] % spec.kv_heads:
        raise UserError(
            f"q must be [B,T,N,H] with T at least 1 and N a multiple of the spec's kv_heads="
            f"{spec.kv_heads}, got {q.shape}"
        )
    rows, tokens, heads = q.shape[:3]
    sizes = {"B": rows, "T": tokens, "N": heads, "K": spec.kv_heads, "H": spec.head_dim}
    given = [("q", "BTNH", q), ("k", "BTKH", k), ("v", "BTKH", v), ("positions", "BT", positions),
             ("valid", "BT", valid)]  # fmt: skip
    for name, letters, array in given + ([] if sink is None else [("sink", "N", sink)]):
        shape = tuple(sizes[letter] for letter in letters)
        if array.shape != shape:
            raise UserError(f"{name} must be {shape} beside q {q.shape}, got {array.shape}")
    for name, kind, array in (("positions", "uint32", positions), ("valid", "bool", valid)):
        if array.dtype != kind:
            raise UserError(f"{name} must be {kind}, got {array.dtype}; convert them")
    remedy = f"begin with policy.init(spec, rows={rows}, key=...)"
    wanted, got = type(policy.axes).__name__, type(state).__name__
    if type(state) is not type(policy.axes):
        raise UserError(f"the state must be a {wanted}, got a {got}; {remedy}")
    axes = jax.tree.leaves(policy.axes, is_leaf=is_letters)
    for leaf, letters in zip(jax.tree.leaves(state), axes, strict=True):
        for size, letter in zip(leaf.shape, letters, strict=True):
            if leaf.size and size != sizes.get(letter, size):
                raise UserError(
                    f"a state of this spec and these rows has {letter}={sizes[letter]}, got "
                    f"{letter}={size}; {remedy}"
                )
