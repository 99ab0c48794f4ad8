"""`balance-stream` with contiguous cache-relative positions, to measure what their holes change.

All KV heads of a sequence share one count of sampled tokens. It includes the newest group of level
0 once its first token has come, but each KV head caches another token of the group, often a later
one. Until then the sinks and the sample of that head are one position further from the query.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxkv.contract import Chunk, Leaf, Partial, Spec
from jaxkv.policies.merge_reduce import occupancy
from jaxkv.policies.merge_reduce.balance_stream import BalanceStream
from jaxkv.policies.merge_reduce.base import TreePolicy, TreeState
from jaxkv.typing import Array


@dataclass(frozen=True)
class ContiguousStream(BalanceStream):
    """A balance-stream whose KV heads each count the tokens that they cache.

    A head becomes a sequence of its own, so that it has positions of its own.
    """

    def update(self, spec: Spec, state: TreeState, chunk: Chunk) -> tuple[Partial, TreeState]:
        heads = spec.kv_heads
        state = _map_leaves(self.leaves, state, lambda leaf, array: _split(leaf, array, heads))
        rng = state.rng

        def num_cached(self: TreePolicy, num_evicted: Array) -> Array:
            filled = occupancy.filled_slots(self.size, num_evicted, rng)
            return jnp.sum(filled[:, 0], axis=-1, dtype=jnp.int32)

        head_spec, chunk = dataclasses.replace(spec, kv_heads=1), _by_head(chunk, heads)
        with mock.patch.object(TreePolicy, "_num_sampled", num_cached):
            attended, state = super().update(head_spec, state, chunk)
        attended = Partial(*(_join_heads(x, heads) for x in attended))
        return attended, _map_leaves(
            self.leaves, state, lambda leaf, array: _join(leaf, array, heads)
        )


def _map_leaves(leaves: TreeState, state: TreeState, change: Any) -> TreeState:
    return jax.tree.map(change, leaves, state, is_leaf=lambda leaf: isinstance(leaf, Leaf))


def _split(leaf: Leaf, array: Array, heads: int) -> Array:
    """An array with B K sequences of one KV head each."""
    if "K" in leaf.letters:
        return array.reshape(-1, 1, *array.shape[2:])
    return jnp.repeat(array, heads, axis=0)


def _join(leaf: Leaf, array: Array, heads: int) -> Array:
    """The inverse of `_split`."""
    array = array.reshape(-1, heads, *array.shape[1:])
    return array[:, :, 0] if "K" in leaf.letters else array[:, 0]


def _by_head(chunk: Chunk, heads: int) -> Chunk:
    """A chunk of B K sequences."""
    batch, tokens, _, head_dim = chunk.q.shape

    def split(x: Array) -> Array:
        x = x.reshape(batch, tokens, heads, -1, head_dim).transpose(0, 2, 1, 3, 4)
        return x.reshape(batch * heads, tokens, -1, head_dim)

    rest = (jnp.repeat(x, heads, axis=0) for x in (chunk.positions, chunk.valid))
    return Chunk(split(chunk.q), split(chunk.k), split(chunk.v), *rest)


def _join_heads(x: Array, heads: int) -> Array:
    """out [B K,T,G,H] or lse [B K,T,G] of single KV heads -> [B,T,N,H] or [B,T,N]."""
    x = jnp.moveaxis(x.reshape(-1, heads, *x.shape[1:]), 1, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])
