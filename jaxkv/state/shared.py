"""Arrays that are equal in all layers of one policy (`Leaf.shared`): kept once."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxkv.contract import Policy, State


def deduplicate_shared(policies: Sequence[Policy], states: Sequence[State]) -> tuple[State, ...]:
    """The same states, with one array for each leaf that is equal in all layers of a policy.

    XLA then computes once what layers derive from it, such as masks. In a program of all layers,
    this halves the temporary memory of a long chunk.
    Measured in evals/results/workarounds.json, row shared_leaves.
    """
    return tuple(
        jax.tree.map(
            lambda leaf, array, shared: shared if leaf.shared else array,
            policy.leaves,
            state,
            states[layer],
        )
        for policy, state, layer in zip(policies, states, _firsts(policies), strict=True)
    )


def without_shared(policies: Sequence[Policy], states: Sequence[State]) -> tuple[State, ...]:
    """The states with None for each array that an earlier layer of the policy has too.

    A loop that carries such an array once also updates it once. The inverse is
    `deduplicate_shared`.
    """
    return tuple(
        jax.tree.map(
            lambda leaf, array, repeats=first < layer: None if leaf.shared and repeats else array,
            policy.leaves,
            state,
        )
        for layer, (policy, state, first) in enumerate(
            zip(policies, states, _firsts(policies), strict=True)
        )
    )


def _firsts(policies: Sequence[Policy]) -> list[int]:
    """For each layer the first one with its policy."""
    return [list(policies).index(policy) for policy in policies]
