"""Checks of the arguments of `step`; they cost nothing once compiled."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, Spec, State
from jaxkv.errors import UserError
from jaxkv.typing import Array


def check_is_policy(policy: object) -> None:
    """Raise UserError unless this is a `Policy`."""
    if isinstance(policy, Policy):
        return
    raise UserError(
        "a policy is a value such as jaxkv.policy('streaming'), or of a frozen dataclass that "
        f"subclasses jaxkv.Policy, got {policy!r}"
    )


def check(
    policy: object,
    spec: Spec,
    state: object,
    q: object,
    k: object,
    v: object,
    positions: object,
    valid: object,
    sink_logits: object = None,
) -> None:
    """Raise UserError where the arguments of `step` disagree, or are of another type."""
    check_is_policy(policy)
    arrays = {"q": q, "k": k, "v": v, "positions": positions, "valid": valid}
    if sink_logits is not None:
        arrays["sink_logits"] = sink_logits
    for name, array in arrays.items():
        if not isinstance(array, jax.Array | np.ndarray):
            kind = type(array).__name__
            raise UserError(f"{name} must be an array, got a {kind}; convert it with jnp.asarray")
    _check_arrays(spec, arrays)
    _check_state(policy, spec, state, batch=q.shape[0], group=q.shape[2] // spec.kv_heads)


# Each axis of the arguments of `step`, by letter, and the kind of their numbers.
_AXES = {
    "q": "BTNH",
    "k": "BTKH",
    "v": "BTKH",
    "positions": "BT",
    "valid": "BT",
    "sink_logits": "N",
}
_DTYPES = {"positions": "uint32", "valid": "bool"}


def _check_arrays(spec: Spec, arrays: Mapping[str, Array | np.ndarray]) -> None:
    q = arrays["q"]
    if q.ndim != 4 or 0 in q.shape[:3] or q.shape[2] % spec.kv_heads:
        raise UserError(
            f"q must be [B,T,N,H] with N a multiple of the spec's kv_heads={spec.kv_heads}, and B, "
            f"T and N at least 1, got {q.shape}; give one sequence, token and head or more"
        )
    batch, tokens, heads = q.shape[:3]
    group = heads // spec.kv_heads
    sizes = {"B": batch, "T": tokens, "N": heads, "K": spec.kv_heads, "H": spec.head_dim}
    for name, array in arrays.items():
        letters = _AXES[name]
        shape = tuple(sizes[letter] for letter in letters)
        if letters[-1] == "H" and array.ndim == 4 and array.shape[3] != spec.head_dim:
            raise UserError(
                f"{name} must have the spec's head_dim={spec.head_dim} as its last axis, got "
                f"{array.shape}; give Spec(head_dim={array.shape[3]}) and an encoding for it"
            )
        if array.shape != shape:
            raise UserError(
                f"{name} must be [{','.join(letters)}] = {shape} beside q {q.shape} and the spec's "
                f"kv_heads={spec.kv_heads}, got {array.shape}; transpose it, for example from "
                "[B,N,T,H], or give one state and its arrays per layer"
            )
    if spec.group not in (None, group):
        raise UserError(
            f"the spec's group must be N/K={group} beside q {q.shape}, got {spec.group}; give "
            f"Spec(group={group})"
        )
    for name in ("q", "k", "v"):
        if not jnp.issubdtype(arrays[name].dtype, jnp.floating):
            raise UserError(f"{name} must be floating point, got {arrays[name].dtype}; convert it")
    for name, kind in _DTYPES.items():
        if arrays[name].dtype != kind:
            raise UserError(f"{name} must be {kind}, got {arrays[name].dtype}; convert it")


def _check_state(policy: Policy, spec: Spec, state: State, batch: int, group: int) -> None:
    remedy = f"begin with policy.init(spec, batch={batch}, rng=...)"
    expected_type, got = type(policy.leaves).__name__, type(state).__name__
    if type(state) is not type(policy.leaves):
        raise UserError(f"the state must be a {expected_type}, got a {got}; {remedy}")
    if jax.tree.structure(state) != jax.tree.structure(policy.leaves):
        raise UserError(
            f"the state must have the arrays of {policy!r}, got those of another storage= or "
            f"sinks=; {remedy}, or give the policy that made the state"
        )
    sizes = {"B": batch, "K": spec.kv_heads, "G": group, "H": spec.head_dim}
    for array, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(policy.leaves), strict=True):
        for size, letter in zip(array.shape, leaf.letters, strict=True):
            if array.size and size != sizes.get(letter, size):
                raise UserError(
                    f"a state of this spec and batch has {letter}={sizes[letter]}, got "
                    f"{letter}={size}; {remedy}"
                )
    if policy.grows or policy.min_prompt is not None:
        return  # its sizes depend on the tokens, or change at the end of prefill
    leaves, shapes = jax.tree.leaves(policy.leaves), [a.shape for a in jax.tree.leaves(state)]
    fixed_shapes = _fixed_shapes(policy, spec, batch)
    for leaf, shape, expected in zip(leaves, shapes, fixed_shapes, strict=True):
        if shape != expected:
            raise UserError(
                f"a state of {policy!r} has an array [{leaf.axes}] of {expected}, got {shape}; "
                f"{remedy}, or give the policy that made the state"
            )


@functools.lru_cache(maxsize=256)
def _fixed_shapes(policy: Policy, spec: Spec, batch: int) -> list[tuple[int, ...]]:
    """The shapes of the state of a policy whose sizes never change."""
    state = jax.eval_shape(lambda: policy.init(spec, batch, jax.random.key(0)))
    return [array.shape for array in jax.tree.leaves(state)]
