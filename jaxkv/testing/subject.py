"""A policy under test: its tokens, its runs, and the comparisons that the laws make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Cached, Chunk, Leaf, Partial, Policy, Spec, State
from jaxkv.rotary import Alibi, Rotary, rotary
from jaxkv.state import batch
from jaxkv.state.batch import Shaped
from jaxkv.typing import Bool, Float

BATCH = 4
SPEC = Spec(kv_heads=3, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0), group=2)
MAX_CAPACITY = 512  # tokens up to which a capacity is looked for
MAX_BYTES = 1 << 28  # of the states of one run
# Most of a law's time is compiling; without optimization it takes half as long.
QUICK = {"xla_backend_optimization_level": 0}
COMPILED = Counter()  # (policy, spec) -> how many programs of `update` were traced
DType = str | np.dtype
Checks = Iterator[tuple[str, bool]]  # what is wrong, and whether the check passes
# The number of a query's token -> the numbers of the tokens that are cached when it attends.
CachedTokens = Callable[[int], Sequence[int]]


class Trajectory(NamedTuple):
    """outs: outputs of all tokens. states[i]: the state after `counts[i]` tokens.

    All states if they fit into MAX_BYTES; else those after every 64th token, the prompt and the
    end.
    """

    outs: Float[np.ndarray, "B T N H"]
    states: list[State]
    counts: list[int]


@dataclass(frozen=True)
class Subject:
    """A policy and the tokens of its laws.

    capacity: the policy evicts none of its first `capacity` tokens.
    tokens: four sequences, see `draw_tokens`.
    sizes: chunk sizes, the first of them 1.
    tolerance: largest error of outputs.
    real_widths: chunks are compiled at their size; else at two widths, 1 and the largest size, with
      padding.
    """

    policy: Policy
    capacity: int
    tokens: Chunk
    sizes: tuple[int, ...]
    spec: Spec = SPEC
    cached_tokens: CachedTokens | None = None
    tolerance: float = 1e-5
    real_widths: bool = False
    runs: dict[int, Trajectory] = field(default_factory=dict, compare=False)

    @property
    def count(self) -> int:
        return self.tokens.q.shape[1]

    @property
    def finishes(self) -> bool:
        """Whether the policy does anything at the end of prefill."""
        return self.policy.min_prompt is not None

    @property
    def prompt(self) -> int:
        """The number of tokens after which prefill ends."""
        return min(2 * self.capacity + 1, 2 * self.count // 3)

    def init(self, sequences: int = BATCH) -> State:
        return self.policy.init(self.spec, sequences, jax.random.key(7))

    def read(self, size: int) -> Trajectory:
        """All tokens in chunks of `size`; memoised, because several laws ask for it."""
        if size not in self.runs:
            self.runs[size] = self.read_tokens(self.tokens, size)
        return self.runs[size]

    def read_tokens(self, tokens: Chunk, size: int, state: State | None = None) -> Trajectory:
        """Other tokens in chunks of `size`. Prefill ends after the prompt."""
        state = self.init(tokens.q.shape[0]) if state is None else state
        outs, states, counts = [], [], []
        for begin, end, since in self.parts(tokens.q.shape[1]):
            if begin and self.finishes:
                state = finish_prefill(self.policy, self.spec, state)
            for at in range(begin, end, size):
                stop = min(at + size, end)
                state = self.policy.reserve(self.spec, state, stop - since)
                chunk = widen(cut(tokens, at, stop), self.width(size))
                partial, state = update(self.policy, self.spec, state, chunk)
                outs.append(np.asarray(partial.out)[:, : stop - at])
                affordable = batch.nbytes(state) * tokens.q.shape[1] <= MAX_BYTES
                if affordable or stop == end or not stop % 64:
                    states.append(state)
                    counts.append(stop)
        return Trajectory(np.concatenate(outs, axis=1), states, counts)

    def parts(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Begin and end of prompt and answer, and the token that `reserve` counts from."""
        prompt = min(self.prompt, count)
        yield 0, prompt, 0
        if prompt < count:
            yield prompt, count, prompt if self.finishes else 0

    def width(self, size: int) -> int:
        """The compiled width of a chunk: compiling every size would take most of the time."""
        return size if size == 1 or self.real_widths else max(self.sizes)

    def after_prompt(self) -> State:
        """The state after the prompt, where its prefill has finished, with room for more."""
        run = self.read(self.sizes[0])
        state = run.states[run.counts.index(min(self.prompt, self.count))]
        if self.finishes:
            state = finish_prefill(self.policy, self.spec, state)
        return self.policy.reserve(self.spec, state, self.count)

    def next(self, size: int) -> Chunk:
        """New tokens for `after_prompt`; the last sequence has only padding."""
        new = draw_tokens(self.spec, size, seed=5, dtype=self.tokens.q.dtype)
        before = self.tokens.valid[:, : self.prompt].sum(axis=1, keepdims=True)
        positions = (before + np.arange(size)).astype(np.uint32)
        valid = np.arange(BATCH)[:, None] < np.full((1, size), BATCH - 1)
        repeated = [np.repeat(leaf[:1], BATCH, axis=0) for leaf in new[:3]]
        return Chunk(*(x + 0.1 * i for i, x in enumerate(repeated)), positions, valid)

    def step(self, state: State, chunk: Chunk) -> tuple[Partial, State]:
        return update(self.policy, self.spec, state, chunk)

    def cached(self, state: State) -> list[list[dict[int, float]]]:
        """Each cached position with its log weight, by sequence and KV head."""
        cache = cached(self.policy, self.spec, state)
        pairs = zip(np.asarray(cache.positions), np.asarray(cache.log_weight), strict=True)
        return [
            [
                {int(p): round(float(w), 4) for p, w in zip(*head, strict=True) if w > -np.inf}
                for head in zip(positions, weights, strict=True)
            ]
            for positions, weights in pairs
        ]


def draw_tokens(
    spec: Spec, count: int, seed: int = 0, start: int = 0, dtype: DType = "float32"
) -> Chunk:
    """Random tokens of four sequences: whole, padded on the left, padded anywhere, and empty.

    The first position is `start`. Padding holds large numbers, as a buffer that is used again may.
    """
    rng = np.random.default_rng(seed)
    valid = np.stack(
        [
            np.ones(count, bool),
            np.arange(count) >= count // 3,
            rng.random(count) < 0.6,
            np.zeros(count, bool),
        ]
    )
    heads = (spec.kv_heads * (spec.group or 1), spec.kv_heads, spec.kv_heads)
    q, k, v = (rng.normal(size=(BATCH, count, n, spec.head_dim)) for n in heads)
    for x in (q, k, v):
        x[~valid] *= 1e4
    positions = (start + np.cumsum(valid, axis=1) - 1) % 2**32
    positions = np.where(valid, positions, rng.integers(0, 2**32, valid.shape))
    q, k, v = (x.astype(np.float32).astype(jnp.dtype(dtype)) for x in (q, k, v))
    return Chunk(q, k, v, positions.astype(np.uint32), valid)


def find_capacity(subject: Subject) -> int:
    """How many tokens the policy caches before it evicts one."""
    policy, spec = subject.policy, subject.spec
    tokens = take_sequences(draw_tokens(spec, MAX_CAPACITY), [0])
    state = policy.reserve(spec, subject.init(1), MAX_CAPACITY)
    for count in range(1, MAX_CAPACITY + 1):
        _, state = subject.step(state, cut(tokens, count - 1, count))
        cache = cached(policy, spec, state)
        positions = np.asarray(cache.positions, np.int64)
        present = np.sort(np.where(np.asarray(cache.log_weight) > -np.inf, positions, 2**32))
        if present.shape[2] < count or (present[:, :, :count] != np.arange(count)).any():
            return max(1, count - 1)
    # Long enough that `finish_prefill` compresses the prompt of the laws, which is twice as long.
    return max(64, policy.min_prompt or 0) if policy.grows else MAX_CAPACITY


def find_eviction(subject: Subject) -> int:
    """How many tokens it takes until one that was cached is evicted, or nothing changes any more.

    More than the capacity where a policy skips tokens. At most 512.
    """
    tokens = take_sequences(draw_tokens(subject.spec, MAX_CAPACITY), [0])
    state, before, last = subject.init(1), [set()] * subject.spec.kv_heads, 1
    for count in range(1, MAX_CAPACITY + 1):
        _, state = subject.step(state, cut(tokens, count - 1, count))
        now = [set(head) for head in subject.cached(state)[0]]
        if any(old - new for old, new in zip(before, now, strict=True)):
            return count
        before, last = now, last if now == before else count
    return last


def cut(tokens: Chunk, begin: int, end: int) -> Chunk:
    return Chunk(*(leaf[:, begin:end] for leaf in tokens))


def take_sequences(tokens: Chunk, order: Sequence[int]) -> Chunk:
    return Chunk(*(leaf[list(order)] for leaf in tokens))


def widen(chunk: Chunk, width: int) -> Chunk:
    """The chunk with padding at its end."""
    missing = width - chunk.q.shape[1]
    return Chunk(*(np.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) for x in chunk))


def compact(tokens: Chunk) -> Chunk:
    """The same tokens with all padding moved to the end of each sequence, as zeros."""
    compacted = Chunk(*(np.zeros_like(leaf) for leaf in tokens))
    for sequence, valid in enumerate(tokens.valid):
        for old, new in zip(tokens, compacted, strict=True):
            new[sequence, : valid.sum()] = old[sequence][valid]
    return compacted


@partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def update(policy: Policy, spec: Spec, state: State, chunk: Chunk) -> tuple[Partial, State]:
    """`policy.update`, compiled once per shape."""
    COMPILED[policy, spec] += 1
    return policy.update(spec, state, chunk)


@partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def finish_prefill(policy: Policy, spec: Spec, state: State) -> State:
    return policy.finish_prefill(spec, state)


@partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def cached(policy: Policy, spec: Spec, state: State) -> Cached:
    return policy.cached(spec, state)


def arrays(first: State, second: State) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The arrays of two states, pairwise."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return ((np.asarray(a), np.asarray(b)) for a, b in pairs)


def same_shapes(first: State, second: State) -> bool:
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in arrays(first, second))


def same_bits(first: State, second: State) -> bool:
    return same_shapes(first, second) and all(
        a.tobytes() == b.tobytes() for a, b in arrays(first, second)
    )


def close(first: State, second: State, tolerance: float = 1e-6) -> bool:
    """Equal whole numbers; others equal up to the rounding of two compiled programs."""
    if not same_shapes(first, second):
        return False
    for a, b in arrays(first, second):
        rounding = 8e-3 if a.dtype == jnp.bfloat16 else tolerance
        exact = a.dtype.kind in "iub"
        if exact and not np.array_equal(a, b):
            return False
        a, b = (x.astype(np.float64) for x in (a, b))
        if not exact and not np.allclose(a, b, rounding, rounding, equal_nan=True):
            return False
    return True


def dense_logits(spec: Spec, tokens: Chunk) -> Float[np.ndarray, "B N T S"]:
    """The logits of all pairs of tokens in plain numpy."""
    q, k = (rotate(spec, np.asarray(x, np.float64), tokens.positions) for x in tokens[:2])
    k = np.repeat(k, tokens.q.shape[2] // spec.kv_heads, axis=2)
    logits = np.einsum("btnh,bsnh->bnts", q, k) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * np.tanh(logits / spec.softcap)
    if isinstance(spec.encoding, Alibi):
        at = tokens.positions.astype(np.int64)
        distance = at[:, None, :, None] - at[:, None, None, :]
        logits -= np.asarray(spec.encoding.slopes)[:, None, None] * distance
    return logits


def dense(
    spec: Spec, tokens: Chunk, seen: Bool[np.ndarray, "T T"] | None = None
) -> Float[np.ndarray, "B T N H"]:
    """Softmax attention in plain numpy. seen: mask of query and key; None is causal."""
    logits = dense_logits(spec, tokens)
    v = np.repeat(np.asarray(tokens.v, np.float64), tokens.q.shape[2] // spec.kv_heads, axis=2)
    seen = np.tri(logits.shape[2], dtype=bool) if seen is None else seen
    logits[:, :, ~seen] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def rotate(spec: Spec, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Vectors [B,T,*,H] rotated to their positions, where the encoding is a rotation."""
    if not isinstance(spec.encoding, Rotary):
        return x
    frequencies = np.asarray(spec.encoding.frequencies, np.uint32)
    angle = (positions[..., None] * frequencies)[:, :, None] * (2 * np.pi / 2**32)
    cos, sin = (spec.encoding.amplitude * f(angle) for f in (np.cos, np.sin))
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def named_leaves(policy: Policy, state: State) -> list[tuple[str, Leaf, Shaped]]:
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
