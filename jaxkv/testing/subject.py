"""What the laws are asked about: a policy, its tokens, and the comparisons that laws make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.contract import Chunk, Leaf, Policy, Spec, State
from jaxkv.rotary import rotary
from jaxkv.typing import Bool, Float

BATCH, GROUP, TOLERANCE = 2, 2, 1e-4
SPEC = Spec(kv_heads=3, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0), group=GROUP)
MAX_CAPACITY = 512  # tokens up to which a capacity is looked for
# Most of a law's time is compiling; without optimization it takes half as long.
QUICK = {"xla_backend_optimization_level": 0}
# The number of a query's token -> the numbers of the tokens that are cached when it attends.
CachedTokens = Callable[[int], Sequence[int]]


class Subject(NamedTuple):
    """A policy and the tokens of its laws; it evicts none of the first `capacity` tokens."""

    policy: Policy
    capacity: int
    tokens: Chunk
    cached_tokens: CachedTokens | None
    scores_chunks: bool

    def init(self) -> State:
        return self.policy.init(SPEC, BATCH, jax.random.key(0))

    def read(self, tokens: Chunk, size: int) -> tuple[np.ndarray, State]:
        """The output of all tokens, `size` at a time, and the state after them."""
        count = tokens.q.shape[1]
        state, outs = self.policy.reserve(SPEC, self.init(), count), []
        for at in range(0, count, size):
            out, state = step(self.policy, state, cut(tokens, at, at + size))
            outs.append(np.asarray(out))
        return np.concatenate(outs, axis=1), state

    def full(self) -> State:
        """A state that has evicted tokens, with room for more."""
        _, state = self.read(cut(self.tokens, 0, self.capacity + 3), 7)
        return self.policy.reserve(SPEC, state, self.tokens.q.shape[1])

    def next(self, size: int) -> Chunk:
        """The tokens after those of `full`."""
        return cut(self.tokens, self.capacity + 3, self.capacity + 3 + size)

    def cached(self, state: State) -> list[list[list[int]]]:
        """The cached positions, in order, by sequence and KV head."""
        found = self.policy.cached(SPEC, state)
        return [
            [sorted(p[w > -np.inf].tolist()) for p, w in zip(*heads, strict=True)]
            for heads in zip(np.asarray(found.positions), np.asarray(found.log_weight), strict=True)
        ]


def find_capacity(subject: Subject) -> int:
    """How many tokens the policy caches before it evicts one."""
    tokens = draw_tokens(MAX_CAPACITY)
    state = subject.policy.reserve(SPEC, subject.init(), MAX_CAPACITY)
    for count in range(1, MAX_CAPACITY + 1):
        _, state = step(subject.policy, state, cut(tokens, count - 1, count))
        if subject.cached(state) != [[list(range(count))] * SPEC.kv_heads] * BATCH:
            return max(1, count - 1)
    return 64 if subject.policy.grows else MAX_CAPACITY


def draw_tokens(count: int, seed: int = 0) -> Chunk:
    """Random tokens of two sequences."""
    rng, heads = np.random.default_rng(seed), SPEC.kv_heads
    shape = (BATCH, count, heads, SPEC.head_dim)
    q = rng.normal(size=(BATCH, count, GROUP * heads, SPEC.head_dim))
    k, v = rng.normal(size=shape), rng.normal(size=shape)
    positions = np.broadcast_to(np.arange(count, dtype=np.uint32), (BATCH, count))
    q, k, v = (jnp.asarray(array, jnp.float32) for array in (q, k, v))
    return Chunk(q, k, v, jnp.asarray(positions), jnp.ones((BATCH, count), bool))


def cut(tokens: Chunk, begin: int, end: int) -> Chunk:
    return Chunk(*(leaf[:, begin:end] for leaf in tokens))


def pad_between(tokens: Chunk) -> Chunk:
    """The same tokens with padding before them and after every second one."""
    count = tokens.q.shape[1]
    places = np.repeat(np.arange(count), np.where(np.arange(count) % 2, 2, 1))
    there = np.append(True, places[1:] != places[:-1])
    places, there = np.append([0, 0, 0], places), np.append([False] * 3, there)
    chunk = Chunk(*(leaf[:, places] for leaf in tokens))
    return chunk._replace(valid=jnp.broadcast_to(jnp.asarray(there), chunk.valid.shape))


@partial(jax.jit, static_argnames=("policy", "spec"), compiler_options=QUICK)
def step(policy: Policy, state: State, tokens: Chunk, spec: Spec = SPEC) -> tuple[jax.Array, State]:
    """jaxkv.step, compiled once per width."""
    return jaxkv.step(policy, spec, state, *tokens)


def same_bits(one: State, other: State) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def close(one: State, other: State) -> bool:
    """Equal up to the rounding of two compiled programs."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(np.asarray(a), np.asarray(b), atol=TOLERANCE) for a, b in pairs)


def dense(
    tokens: Chunk, seen: Bool[np.ndarray, "T T"] | None = None
) -> Float[np.ndarray, "B T N H"]:
    """Softmax attention in plain numpy; seen: by query and key; None: causal."""
    q, k = (np.asarray(SPEC.encoding.rotate(x, tokens.positions)) for x in (tokens.q, tokens.k))
    k, v = (np.repeat(np.asarray(x), GROUP, axis=2) for x in (k, tokens.v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) * SPEC.scale
    seen = np.tri(logits.shape[2], dtype=bool) if seen is None else seen
    logits[:, :, ~seen] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def named_leaves(policy: Policy, state: State) -> list[tuple[str, Leaf, jax.Array]]:
    """Each array of a state with its name and its `Leaf`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    leaves = jax.tree.leaves(policy.leaves)
    return [
        (jax.tree_util.keystr(path), leaf, array)
        for (path, array), leaf in zip(paths, leaves, strict=True)
    ]


def of_head(policy: Policy, state: State, head: int) -> State:
    """The part of a state that belongs to one KV head."""

    def pick(leaf: Leaf, array: jax.Array) -> jax.Array:
        if "K" not in leaf.letters:
            return array
        return jnp.take(array, jnp.array([head]), leaf.letters.index("K"))

    return jax.tree.map(pick, policy.leaves, state)
