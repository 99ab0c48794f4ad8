"""The states of all layers as a compiled call carries them: what is equal only once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax

from jaxkv.contract import Policy, State


def share(policies: Sequence[Policy], states: Sequence[State]) -> tuple[State, ...]:
    """The same states, with one array for what is equal in every layer of a policy.

    What layers compute from it, such as masks, XLA then computes once.
    """
    shared = []
    for policy, state, first in zip(policies, states, _first_layers(policies), strict=True):
        for path in _paths(policy):
            state = _put(state, path, functools.reduce(getattr, path.split("."), states[first]))
        shared.append(state)
    return tuple(shared)


def fold(policies: Sequence[Policy], states: Sequence[State], sharded: bool) -> tuple[State, ...]:
    """The states for a loop to carry: shared leaves once, rows and kv heads of large leaves merged.

    XLA copies a cache that is carried as 4-D or 5-D whole. sharded: over a mesh, where rows and kv
    heads are split each by itself, they stay apart.
    """
    folded = []
    for layer, (policy, state, first) in enumerate(
        zip(policies, states, _first_layers(policies), strict=True)
    ):
        if not sharded:
            state = jax.tree.map(_merge, state)
        if first != layer:
            for path in _paths(policy):
                state = _put(state, path, None)
        folded.append(state)
    return tuple(folded)


def _merge(leaf: jax.Array) -> jax.Array:
    rows, *rest = leaf.shape
    return leaf if leaf.ndim < 4 else leaf.reshape(rows * rest[0], *rest[1:])


def unfold(
    policies: Sequence[Policy], states: Sequence[State], like: Sequence[State]
) -> tuple[State, ...]:
    """What `fold` was given; like: states of the same shapes."""
    return tuple(
        jax.tree.map(lambda a, old: a.reshape(old.shape), state, whole)
        for state, whole in zip(share(policies, states), like, strict=True)
    )


def _first_layers(policies: Sequence[Policy]) -> list[int]:
    """For each layer the first one with an equal policy."""
    return [list(policies).index(policy) for policy in policies]


def _paths(policy: Policy) -> tuple[str, ...]:
    return getattr(policy, "shared", ())


def _put(state: State, path: str, leaf: jax.Array | None) -> State:
    """The state with another leaf; path: its name, behind that of the state that it is part of."""
    name, _, rest = path.partition(".")
    return state._replace(**{name: _put(getattr(state, name), rest, leaf) if rest else leaf})
