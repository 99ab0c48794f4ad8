"""The states of all layers as a compiled loop carries them: shared arrays once, heads flattened.

Record workarounds, rows flatten_heads and shared_leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxkv.contract import Policy, State


def deduplicate_shared(policies: Sequence[Policy], states: Sequence[State]) -> tuple[State, ...]:
    """The same states, with one array for each leaf that is equal in all layers of a policy.

    XLA then computes once what layers derive from it, such as masks.
    """
    return tuple(
        jax.tree.map(
            lambda leaf, array, shared: shared if leaf.shared else array,
            policy.leaves, state, states[first],
        )
        for policy, state, first in zip(policies, states, _first_layers(policies), strict=True)
    )  # fmt: skip


def flatten_heads(
    policies: Sequence[Policy], states: Sequence[State], sharded: bool
) -> tuple[State, ...]:
    """The states for a loop to carry: shared leaves once, B and K of large leaves merged.

    XLA copies a cache whole if a loop carries it as 4-D or 5-D. sharded: over a mesh batch and KV
    heads are split separately, so they stay apart.
    """
    flat = []
    for layer, (policy, state, first) in enumerate(
        zip(policies, states, _first_layers(policies), strict=True)
    ):
        if not sharded:
            state = jax.tree.map(_flatten, state)
        if first != layer:
            state = jax.tree.map(
                lambda leaf, array: None if leaf.shared else array, policy.leaves, state
            )
        flat.append(state)
    return tuple(flat)


def _flatten(leaf: jax.Array) -> jax.Array:
    batch, *rest = leaf.shape
    return leaf if leaf.ndim < 4 else leaf.reshape(batch * rest[0], *rest[1:])


def restore_heads(
    policies: Sequence[Policy], states: Sequence[State], like: Sequence[State]
) -> tuple[State, ...]:
    """The inverse of `flatten_heads`; like: states of the same shapes."""
    firsts = _first_layers(policies)
    restored = (
        jax.tree.map(
            lambda leaf, array, shared: shared if leaf.shared else array,
            policy.leaves, state, states[first],
        )
        for policy, state, first in zip(policies, states, firsts, strict=True)
    )  # fmt: skip
    return tuple(
        jax.tree.map(lambda array, old: array.reshape(old.shape), state, whole)
        for state, whole in zip(restored, like, strict=True)
    )


def _first_layers(policies: Sequence[Policy]) -> list[int]:
    """For each layer the first layer with an equal policy."""
    return [list(policies).index(policy) for policy in policies]
