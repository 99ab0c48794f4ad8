"""The only driver: one chunk of tokens through one layer's cache."""

from __future__ import annotations

import jax
import numpy as np

from jaxkv.attention import merge, sink_logit
from jaxkv.contract import Chunk, Policy, Spec, State, check_is_policy
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
    """Attend to the cache and the chunk, absorb the chunk; the attention output and new state.

    q, k: after q/k norms and before rotation. positions: the index of each token in its sequence,
    from 0. valid: False on padding, whose output is 0. sink: one learned sink logit per query head,
    merged once. Raises UserError where shapes disagree with each other, the spec or the state.
    """
    check(policy, spec, state, q, k, v, positions, valid, sink)
    partial, state = policy.update(spec, state, Chunk(q, k, v, positions, valid))
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
    """Raise UserError where the arguments of `step` disagree; costs nothing once compiled."""
    check_is_policy(policy)
    if q.ndim != 4 or q.shape[1] < 1 or q.shape[2] % spec.kv_heads:
        raise UserError(
            f"q must be [B,T,N,H] with T at least 1 and N a multiple of the spec's kv_heads="
            f"{spec.kv_heads}, got {q.shape}"
        )
    batch, tokens, heads = q.shape[:3]
    group = heads // spec.kv_heads
    if spec.group not in (None, group):
        raise UserError(
            f"the spec's group must be N/K={group} beside q {q.shape}, got {spec.group}; give "
            f"Spec(group={group})"
        )
    sizes = {"B": batch, "T": tokens, "N": heads, "K": spec.kv_heads, "H": spec.head_dim}
    given = [("q", "BTNH", q), ("k", "BTKH", k), ("v", "BTKH", v), ("positions", "BT", positions),
             ("valid", "BT", valid)]  # fmt: skip
    for name, letters, array in given + ([] if sink is None else [("sink", "N", sink)]):
        shape = tuple(sizes[letter] for letter in letters)
        if array.shape != shape:
            raise UserError(f"{name} must be {shape} beside q {q.shape}, got {array.shape}")
    for name, kind, array in (("positions", "uint32", positions), ("valid", "bool", valid)):
        if array.dtype != kind:
            raise UserError(f"{name} must be {kind}, got {array.dtype}; convert them")
    remedy = f"begin with policy.init(spec, batch={batch}, rng=...)"
    state_sizes = {"B": batch, "K": spec.kv_heads, "G": group, "H": spec.head_dim}
    wanted, got = type(policy.leaves).__name__, type(state).__name__
    if type(state) is not type(policy.leaves):
        raise UserError(f"the state must be a {wanted}, got a {got}; {remedy}")
    if jax.tree.structure(state) != jax.tree.structure(policy.leaves):
        raise UserError(
            f"the state must have the arrays of {policy!r}, got those of another cache= or sinks=; "
            f"{remedy}, or give the policy that made the state"
        )
    for array, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(policy.leaves), strict=True):
        for size, letter in zip(array.shape, leaf.letters, strict=True):
            if array.size and size != state_sizes.get(letter, size):
                raise UserError(
                    f"a state of this spec and batch has {letter}={state_sizes[letter]}, got "
                    f"{letter}={size}; {remedy}"
                )
