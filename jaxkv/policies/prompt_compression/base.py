"""Prompt compression: the state and the steps that one-shot methods share.

Until the end of prefill every token is cached and attention is exact. `finish_prefill` keeps the
first and the last tokens of the prompt, and lets the method choose a sample of those between.
Generated tokens are cached exactly after that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import contract, draws, rows
from jaxkv.attention import merge
from jaxkv.cache import per_head, per_layer, ring
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.cache.per_layer import PerLayerTokens
from jaxkv.cache.ring import Ring
from jaxkv.contract import Cached, Chunk, Leaf, Partial, Policy, Spec, prefill_finished
from jaxkv.errors import UserError, check_choice
from jaxkv.rows import Storage
from jaxkv.typing import Array, Float, Float32, Int32, UInt32

# Tokens of a prompt, with log weights, -inf in empty slots.
Chosen = tuple[PerHeadTokens | PerLayerTokens, Float32[Array, "B X C"]]
Budgets = Literal["equal", "adaptive"]  # how the KV heads of a layer share its budget
SAFEGUARD = 5  # adaptive budgets leave a fifth of an equal share to every KV head (AdaKV)
# The tokens between the ends [B,K,S,*] and their number -> what replaces them.
Choose = Callable[[PerHeadTokens, Int32[Array, " B"]], Chosen]


class CompressedState(NamedTuple):
    """dense: every token; after prefill the prompt's ends and the generated tokens.

    sample, log_weight: the compressed prompt; no slots before the end of prefill. X is K, or 1
    where budgets are adaptive and the rows of all KV heads are together. queries: the last W
    queries of the prompt, rotated, for methods that score by them; query_positions: theirs. Both
    are empty after prefill. rng: seeds of the draws.
    """

    dense: Ring
    sample: PerHeadTokens | PerLayerTokens
    log_weight: Float32[Array, "B X C"]
    queries: Float[Array, "B K W G H"]
    query_positions: UInt32[Array, "B W"]
    rng: UInt32[Array, "B K 2"]

    @property
    def prompt_slots(self) -> int:
        return self.log_weight.shape[2]


LEAVES = CompressedState(
    dense=ring.DENSE_LEAVES,
    sample=per_head.LEAVES,
    log_weight=Leaf("B K C"),
    queries=Leaf("B K W G H"),
    query_positions=Leaf("B W", shared=True),
    rng=Leaf("B K 2"),
)


class ExactEnds(NamedTuple):
    """The first `sinks` and the last `window` tokens of a prompt, which stay exact.

    The others are compressed in groups of `multiple`; the newest that make no group stay too.
    """

    sinks: int
    window: int
    multiple: int = 1

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens that stay exact."""
        return self.sinks + self.window + self.multiple - 1


class CompressionPolicy(Policy):
    """A policy that compresses a prompt: a frozen dataclass with these fields, `ends` and `choose`.

    num_queries: how many of the last queries the state stores until the end of prefill. budgets: a
    field of policies that choose the best tokens by a score.
    """

    start: int
    storage: Storage

    grows: ClassVar[bool] = True
    num_queries: ClassVar[int] = 0
    budgets: ClassVar[Budgets] = "equal"

    def __post_init__(self) -> None:
        rows.check(self.storage)
        check_choice("budgets", self.budgets, ("equal", "adaptive"))
        sinks = self.ends.sinks
        if self.storage == "int8" and self.start < sinks:
            raise UserError(
                f"start must be at least sinks with storage=int8, got {self.start} and {sinks}; "
                "try start=512"
            )

    @property
    def ends(self) -> ExactEnds:
        """The tokens of a prompt that stay exact."""
        raise contract.missing(self, "ends")

    def choose(
        self, spec: Spec, state: CompressedState, tokens: PerHeadTokens, count: Int32[Array, " B"]
    ) -> Chosen:
        """Select the tokens that represent the first `count` between the ends of the prompt."""
        raise contract.missing(self, "choose")

    @property
    def leaves(self) -> CompressedState:
        exact = ring.leaves(self.storage, self.ends.sinks, ring.DENSE_LEAVES)
        if self.heads_compete:
            weight = Leaf("B I R")
            return LEAVES._replace(
                dense=exact, sample=per_layer.leaves(self.storage), log_weight=weight
            )
        return LEAVES._replace(dense=exact, sample=per_head.leaves(self.storage))

    @property
    def heads_compete(self) -> bool:
        return self.budgets == "adaptive"

    @property
    def min_prompt(self) -> int:
        return self.ends.max_tokens + 1

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> CompressedState:
        if self.num_queries:
            check_group(spec)
        shape = batch, spec.kv_heads, self.num_queries, spec.group or 0, spec.head_dim
        if self.heads_compete:
            sample = per_layer.init(spec, batch, 0, self.storage)
        else:
            sample = per_head.init(spec, batch, 0, self.storage)
        return CompressedState(
            ring.init(spec, batch, self.start, self.storage, self.ends.sinks),
            sample,
            jnp.zeros(sample.positions.shape, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((batch, self.num_queries), jnp.uint32),
            draws.seeds(rng, spec, batch),
        )

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        if self.num_queries:
            check_group(spec)
        slots = rows.slots_for(tokens, self.start)
        prompt = ring.nbytes(spec, slots, self.storage, self.ends.sinks)
        query = 4 * spec.kv_heads * (spec.group or 0) * spec.head_dim + 4
        return prompt + self.num_queries * query + 8 * spec.kv_heads

    def reserve(self, spec: Spec, state: CompressedState, tokens: int) -> CompressedState:
        """Room for `tokens`; after prefill for that many generated tokens, beside the ends."""
        ends = self.ends.max_tokens if prefill_finished(state) else 0
        room = max(0, state.dense.positions.shape[1] - ends)  # which doubles, and not the ends
        size = ends + rows.slots_for(tokens, room, rows.MAX_SLOTS - ends)
        return state._replace(dense=ring.grow(state.dense, size))

    def update(
        self, spec: Spec, state: CompressedState, chunk: Chunk
    ) -> tuple[Partial, CompressedState]:
        """Attend to all cached tokens and the compressed prompt; append the chunk."""
        if prefill_finished(state) and state.dense.positions.shape[1] <= self.ends.max_tokens:
            raise UserError(
                "reserve must be called after finish_prefill, got a state without that; call "
                "state = policy.reserve(spec, state, tokens) for the tokens to come"
            )
        seen, appended = ring.update(spec, state.dense, chunk, ring.dense_settings(state.dense))
        after = _store_queries(spec, state, chunk)._replace(dense=appended)
        if prefill_finished(state):
            seen = merge(seen, self._attend_sample(spec, chunk, state))
        return seen, after

    def _attend_sample(self, spec: Spec, chunk: Chunk, state: CompressedState) -> Partial:
        """Attention of the tokens of a chunk to the compressed prompt."""
        if self.heads_compete:
            return per_layer.attend(spec, chunk, state.sample, state.log_weight)
        visible = chunk.valid[:, None, :, None]
        bias = jnp.where(visible, state.log_weight[:, :, None], -jnp.inf)
        return per_head.attend(spec, chunk.q, chunk.positions, state.sample, bias)

    def cached(self, spec: Spec, state: CompressedState) -> Cached:
        exact, sample = ring.cached(state.dense), Cached(state.sample.positions, state.log_weight)
        if self.heads_compete:
            sample = per_layer.cached(state.sample, state.log_weight, spec.kv_heads)
        return Cached(*(jnp.concatenate(pair, axis=2) for pair in zip(exact, sample, strict=True)))

    def finish_prefill(self, spec: Spec, state: CompressedState) -> CompressedState:
        return compress(state, self.ends, partial(self.choose, spec, state))


def check_capacity(capacity: int, minimum: int, start: int) -> None:
    """Raise UserError for a capacity below `minimum` tokens, or impossible first slots."""
    if not (minimum <= capacity <= rows.MAX_SLOTS and 1 <= start <= rows.MAX_SLOTS):
        raise UserError(
            f"capacity must be from {minimum} and start from 1, both {rows.MAX_SLOTS} at most, got "
            f"{capacity} and {start}; try capacity=1024,start=512"
        )


def check_ends(ends: ExactEnds, start: int) -> None:
    """Raise UserError for impossible ends or first slots."""
    rows.check_sizes(ends.sinks, ends.window, start, "sinks=32,window=32,start=512")


def check_rounds(rounds: int) -> None:
    """Raise UserError unless a prompt is halved 1 to 10 times."""
    if not 1 <= rounds <= 10:
        raise UserError(f"rounds must be from 1 to 10, got {rounds}; try rounds=2")


def check_group(spec: Spec) -> None:
    """Raise UserError where the number of query heads of a KV head is unknown."""
    if spec.group is None:
        raise UserError(
            "this policy stores queries, so it must know how many heads share a KV head; give "
            "Spec(group=...)"
        )


def _store_queries(spec: Spec, state: CompressedState, chunk: Chunk) -> CompressedState:
    """The state with the last W queries, those of the chunk among them."""
    batch, kv_heads, num_queries, group, head_dim = state.queries.shape
    if not num_queries:
        return state
    q = spec.encoding.rotate(chunk.q.astype(jnp.float32), chunk.positions)
    q = q.reshape(batch, -1, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    queries = jnp.concatenate([state.queries, q], axis=2)
    positions = jnp.concatenate([state.query_positions, chunk.positions], axis=1)
    valid = jnp.concatenate([jnp.ones((batch, num_queries), bool), chunk.valid], axis=1)
    order = jnp.argsort(~valid, axis=1, stable=True)  # valid queries first
    new = jnp.sum(chunk.valid, axis=1, dtype=jnp.int32)[:, None]
    last = jnp.take_along_axis(order, new + jnp.arange(num_queries)[None], axis=1)
    return state._replace(
        queries=jnp.take_along_axis(queries, last[:, None, :, None, None], axis=2),
        query_positions=jnp.take_along_axis(positions, last, axis=1),
    )


def compress(state: CompressedState, ends: ExactEnds, choose: Choose) -> CompressedState:
    """Compress the prompt: the tokens between its ends become the sample that `choose` returns.

    Raises UserError for a state whose prefill is finished.
    """
    contract.check_prefill_unfinished(state)
    prompt = state.dense
    batch, kv_heads, size, _ = prompt.k.shape
    count = jnp.maximum(0, jnp.minimum(prompt.count, size) - ends.sinks - ends.window)
    count -= count % ends.multiple
    between = max(0, size - ends.sinks - ends.window)
    if between:
        middle = slice(ends.sinks, ends.sinks + between)
        positions = jnp.broadcast_to(prompt.positions[:, None, middle], (batch, kv_heads, between))
        k, v = (rows.cut(leaf, middle.start, middle.stop) for leaf in prompt[:2])
        chosen, weight = choose(PerHeadTokens(k, v, positions), count)
    else:  # one empty slot: its presence says that prefill is finished
        chosen = resize(state.sample, 1)
        weight = jnp.full(chosen.positions.shape, -jnp.inf, jnp.float32)
    slot = jnp.arange(min(ends.max_tokens, size))[None]
    source = jnp.where(slot < ends.sinks, slot, slot + count[:, None])
    source = jnp.minimum(source, size - 1)
    take = lambda leaf: jnp.take_along_axis(leaf, source[:, None, :, None], axis=2)  # noqa: E731
    exact = Ring(
        *jax.tree.map(take, prompt[:2]),
        jnp.take_along_axis(prompt.positions, source, axis=1),
        # An overfull sequence stays overfull.
        jnp.where(prompt.count > size, rows.OVERFULL, prompt.count - count),
        prompt.exact_sinks,
    )
    return state._replace(
        dense=exact,
        sample=chosen,
        log_weight=weight,
        queries=state.queries[:, :, :0],
        query_positions=state.query_positions[:, :0],
    )


def weighted_sample(
    chosen: PerHeadTokens, count: Int32[Array, " B"], weight: float | Array
) -> Chosen:
    """A sample whose first `count` slots are filled, each with this log weight."""
    filled = jnp.arange(chosen.positions.shape[2])[None, None] < count[:, None, None]
    weight = jnp.where(filled, jnp.float32(weight), -jnp.inf)
    return chosen, jnp.broadcast_to(weight, chosen.positions.shape)


def keep_best(
    tokens: PerHeadTokens,
    count: Int32[Array, " B"],
    score: Float32[Array, "B K S"],
    budget: int,
    budgets: Budgets = "equal",
) -> Chosen:
    """The `budget` highest scores of the first `count` tokens, in the order of the text.

    budgets: "equal" for so many in each KV head, "adaptive" for as many in all KV heads together.
    """
    if budgets == "adaptive":
        return _keep_best_of_layer(tokens, count, score, budget)
    size = tokens.positions.shape[2]
    budget = min(size, budget)
    valid = jnp.arange(size)[None, None] < count[:, None, None]
    _, best = jax.lax.top_k(jnp.where(valid, score, -jnp.inf), budget)
    taken = jnp.sort(jnp.where(jnp.take_along_axis(valid, best, 2), best, size), axis=2)
    taken = jnp.minimum(taken, size - 1).astype(jnp.int32)
    return weighted_sample(per_head.pick(tokens, taken), jnp.minimum(count, budget), 0.0)


def _keep_best_of_layer(
    tokens: PerHeadTokens, count: Int32[Array, " B"], score: Float32[Array, "B K S"], budget: int
) -> Chosen:
    """The highest scores of all KV heads together, head by head (AdaKV, arXiv 2407.11550).

    Each head has at least one part in SAFEGUARD of an equal share.
    """
    batch, kv_heads, size = score.shape
    budget = min(size, budget)
    valid = jnp.broadcast_to(jnp.arange(size)[None, None] < count[:, None, None], score.shape)
    score = jnp.where(valid, score, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-score, axis=2, stable=True), axis=2)
    score = jnp.where(valid & (rank < budget // SAFEGUARD), jnp.inf, score)
    _, best = jax.lax.top_k(score.reshape(batch, -1), kv_heads * budget)
    filled = jnp.take_along_axis(valid.reshape(batch, -1), best, 1)
    place = jnp.sort(jnp.where(filled, best, kv_heads * size), axis=1)[:, None]
    taken = per_head.pick(per_layer.flat(tokens), jnp.minimum(place, kv_heads * size - 1))
    weight = jnp.where(place < kv_heads * size, np.float32(0), -jnp.inf)
    return taken, weight


def resize(tokens: PerHeadTokens | PerLayerTokens, size: int) -> PerHeadTokens | PerLayerTokens:
    """The first `size` slots, padded with empty ones where there are fewer."""
    padding = max(0, size - tokens.positions.shape[2])
    pad = lambda leaf: jnp.pad(leaf, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (leaf.ndim - 3))  # noqa: E731
    return jax.tree.map(lambda leaf: pad(leaf)[:, :, :size], tokens)


def attention_of_last_queries(spec: Spec, state: CompressedState) -> Float32[Array, "B K G S"]:
    """The attention that each token gets from the last queries of the prompt, summed over them."""
    prompt = state.dense
    kv_heads, num_queries = state.queries.shape[1:3]
    logits = jnp.einsum(
        "bkwgh,bksh->bkgws",
        state.queries,
        rows.dequantise(prompt.k).astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    ) * jnp.float32(spec.scale)
    if spec.softcap is not None:
        logits = jnp.float32(spec.softcap) * jnp.tanh(logits / jnp.float32(spec.softcap))
    penalty = spec.encoding.bias(state.query_positions, prompt.positions, kv_heads)
    logits = logits if penalty is None else logits + penalty
    # The j-th of the last queries belongs to token count - W + j and sees the tokens up to it.
    number = prompt.count[:, None] - num_queries + jnp.arange(num_queries)[None]
    slot = jnp.arange(prompt.positions.shape[1])
    seen = slot[None, None] <= number[:, :, None]
    seen = seen[:, None, None]
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(logits - jnp.where(top == -jnp.inf, 0.0, top)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    shares = weights / jnp.where(total == 0, 1.0, total)
    return jnp.sum(shares, axis=3)
