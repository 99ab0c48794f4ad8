"""The states of all layers, as compiled programs take them.

`flatten_heads` is for XLA:CPU. It stays here and not in xla_cpu.py, because it needs its inverse,
and the shapes of donated buffers follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxkv.contract import Policy, State


def deduplicate_shared(policies: Sequence[Policy], states: Sequence[State]) -> tuple[State, ...]:
    """The same states, with one array for each leaf that is equal in all layers of a policy.

    XLA then computes once what layers derive from it, such as masks. In a program of all layers,
    this halves the temporary memory of a long chunk.
    Record workarounds, row shared_leaves.
    """
    first = [list(policies).index(policy) for policy in policies]
    return tuple(
        jax.tree.map(
            lambda leaf, array, shared: shared if leaf.shared else array,
            policy.leaves, state, states[layer],
        )
        for policy, state, layer in zip(policies, states, first, strict=True)
    )  # fmt: skip


def flatten_heads(states: Sequence[State], sharded: bool) -> tuple[State, ...]:
    """The states for a loop to carry: B and K of large leaves merged.

    XLA:CPU copies a cache whole if a loop carries it as 4-D or 5-D. sharded: over a mesh batch and
    KV heads are split separately, so they stay apart.
    Record workarounds, row flatten_heads.
    """
    return tuple(states) if sharded else jax.tree.map(_flatten, tuple(states))


def _flatten(leaf: jax.Array) -> jax.Array:
    batch, *rest = leaf.shape
    return leaf if leaf.ndim < 4 else leaf.reshape(batch * rest[0], *rest[1:])


def restore_heads(states: Sequence[State], like: Sequence[State]) -> tuple[State, ...]:
    """The inverse of `flatten_heads`; like: states of the same shapes."""
    return jax.tree.map(lambda array, old: array.reshape(old.shape), tuple(states), tuple(like))
