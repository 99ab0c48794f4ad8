"""Prompt compression: the state and the steps that its methods share.

Until the end of prefill every token is cached and attention is exact. `finish_prefill` keeps the
first and the last tokens of the prompt, and lets the method choose a sample of those between.
Generated tokens are cached exactly after that.

A method that chooses by a score has a second form, with `every`: it compresses whenever so many
tokens beyond `capacity` are cached, in a prompt and in an answer alike (repeated.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxkv import contract, draws, rows
from jaxkv.attention import chunked_scan, merge
from jaxkv.cache import per_head, per_layer, ring
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.cache.per_layer import PerLayerTokens
from jaxkv.cache.ring import Ring
from jaxkv.contract import Cached, Chunk, Leaf, Partial, Policy, Spec, State, prefill_finished
from jaxkv.errors import UserError, check_choice
from jaxkv.policies.prompt_compression import head_shares, repeated
from jaxkv.policies.prompt_compression.head_shares import SAFEGUARD, LayerBudgets
from jaxkv.rows import Storage
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32

# Tokens of a prompt, with log weights, -inf in empty slots.
Chosen = tuple[PerHeadTokens | PerLayerTokens, Float32[Array, "B X C"]]
# Each KV head has the same budget, those of a layer compete for it, or a file fixes them.
Budgets = Literal["equal", "adaptive", "calibrated"]
Positions = Literal["relative", "absolute"] | None  # None: without `every`; with it, relative
# The tokens between the ends [B,K,S,*] and their number -> what replaces them.
Choose = Callable[[PerHeadTokens, Int32[Array, " B"]], Chosen]
_PIECE = 256  # tokens of a chunk that are absorbed at a time, with `every`; they bound the memory


class CompressedState(NamedTuple):
    """dense: every token; after prefill the prompt's ends and the generated tokens.

    sample, log_weight: the compressed prompt; no slots before the end of prefill. X is K, or 1
    where KV heads have unequal budgets and the rows of all are together. statistics: what the
    method gathers of all tokens for its score; empty after prefill. rng: seeds of the draws.
    head_budgets: how many tokens each KV head keeps, where these numbers are fixed.

    With `every` all sizes are constant, and dense has the ends and up to `every` tokens between.
    """

    dense: Ring
    sample: PerHeadTokens | PerLayerTokens
    log_weight: Float32[Array, "B X C"]
    statistics: State
    rng: UInt32[Array, "B K 2"]
    head_budgets: Int32[Array, "B K"] | tuple[()] = ()

    @property
    def prompt_slots(self) -> int:
        return self.log_weight.shape[2]


LEAVES = CompressedState(
    dense=ring.DENSE_LEAVES,
    sample=per_head.LEAVES,
    log_weight=Leaf("B K C"),
    statistics=(),
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


class ScoredTokens(NamedTuple):
    """What a score is computed from: the cached tokens of each KV head, oldest first.

    stored: as they are stored, keys rotated to their positions in the text. seen: the same tokens
    at the positions at which the newest query sees them. count: filled slots. statistics: those of
    the method. rng: seeds of the draws.
    """

    stored: PerHeadTokens  # [B,K,S]
    seen: PerHeadTokens
    count: Int32[Array, "#B #K"]
    statistics: State
    rng: UInt32[Array, "B K 2"]
    ends: ExactEnds

    @property
    def filled(self) -> Bool[Array, "#B #K S"]:
        return _first(self.count, self.stored.positions.shape[2])

    @property
    def num_between(self) -> Int32[Array, "#B #K"]:
        """The number of tokens between the ends: those that are scored."""
        return jnp.maximum(self.count - self.ends.sinks - self.ends.window, 0)

    @property
    def slots(self) -> slice:
        """The slots between the ends, of which the first `num_between` are filled."""
        return slice(self.ends.sinks, self.stored.positions.shape[2] - self.ends.window)

    @property
    def scored(self) -> Bool[Array, "#B #K C"]:
        """Which of `slots` are filled."""
        size = self.stored.positions.shape[2] - self.ends.sinks - self.ends.window
        return _first(self.num_between, size)

    @property
    def newest_position(self) -> UInt32[Array, "B 1"]:
        """The position of the newest token, which all KV heads have."""
        positions = self.stored.positions[:, 0]
        newest = jnp.clip(self.count[:, :1] - 1, 0, positions.shape[1] - 1)
        return jnp.take_along_axis(positions, newest, axis=1)


class CompressionPolicy(Policy):
    """A policy that compresses a prompt: a frozen dataclass with these fields, and `ends`.

    It defines `choose`; or `score` and the fields capacity, every, positions, budgets, calibration
    and layer_budgets, which `for_layer` sets. A score may need statistics of all tokens:
    `statistics`, their leaves and `observe`.
    """

    start: int
    storage: Storage

    capacity: ClassVar[int] = 0
    budget_rules: ClassVar[tuple[str, ...]] = get_args(Budgets)
    budgets: ClassVar[Budgets] = "equal"
    calibration: ClassVar[str | None] = None
    layer_budgets: ClassVar[LayerBudgets | None] = None
    every: ClassVar[int | None] = None
    positions: ClassVar[Positions] = None
    statistics_leaves: State = ()

    def __post_init__(self) -> None:
        rows.check(self.storage)
        check_choice("budgets", self.budgets, self.budget_rules)
        if (self.budgets == "calibrated") != (self.calibration is not None):
            calibration = "none" if self.calibration is None else self.calibration
            raise UserError(
                "budgets=calibrated and calibration=FILE belong together, got "
                f"budgets={self.budgets},calibration={calibration}; give both or neither"
            )
        check_every(self)
        sinks = self.ends.sinks
        if self.storage == "int8" and self.every is None and self.start < sinks:
            raise UserError(
                f"start must be at least sinks with storage=int8, got {self.start} and {sinks}; "
                "try start=512"
            )

    @property
    def ends(self) -> ExactEnds:
        """The tokens of a prompt that stay exact."""
        raise contract.missing(self, "ends")

    @property
    def budget(self) -> int:
        """The mean number of tokens between the ends that a KV head keeps."""
        return max(0, self.capacity - self.ends.sinks - self.ends.window)

    @property
    def scorer(self) -> CompressionPolicy:
        """The policy whose score and statistics these are."""
        return self

    def score(self, spec: Spec, tokens: ScoredTokens) -> Float32[Array, "B K C"]:
        """A number for each token between the ends; the highest stay."""
        raise contract.missing(self, "choose or score")

    def statistics(self, spec: Spec, batch: int) -> State:
        """The statistics of no tokens."""
        return ()

    def observe(self, spec: Spec, statistics: State, chunk: Chunk) -> State:
        """The statistics with the tokens of a chunk."""
        return statistics

    def choose(
        self, spec: Spec, state: CompressedState, tokens: PerHeadTokens, count: Int32[Array, " B"]
    ) -> Chosen:
        """Select the tokens that represent the first `count` between the ends of the prompt."""
        return self.keep_best(state, tokens, count, self.prompt_score(spec, state))

    def keep_best(
        self,
        state: CompressedState,
        tokens: PerHeadTokens,
        count: Int32[Array, "B ..."],
        score: Float32[Array, "B K S"],
    ) -> Chosen:
        """The highest scores of the first `count` [B,#K] tokens within the KV heads' budgets."""
        if self.budgets == "equal":
            return keep_best(tokens, count, score, self.budget)
        valid = jnp.broadcast_to(_first(count, score.shape[2]), score.shape)
        if self.layer_budgets is None:
            minimum = self.budget // SAFEGUARD
            best = per_layer.best_of_layer(score, valid, self.budget, minimum)
            return per_layer.take(tokens, best, valid)
        heads, total = state.head_budgets, self.layer_budgets.total
        best = per_layer.best_of_heads(score, valid, heads, total)
        chosen, weight = per_layer.take(tokens, best, valid)
        impossible = jnp.any(heads < 0, axis=1) | (jnp.sum(heads, axis=1) > total)
        return chosen, jnp.where(impossible[:, None, None], jnp.nan, weight)

    def prompt_score(self, spec: Spec, state: CompressedState) -> Float32[Array, "B K C"]:
        """The score of the tokens between the ends of a prompt."""
        prompt, shape = state.dense, state.dense.k.shape[:3]
        positions = jnp.broadcast_to(prompt.positions[:, None], shape)
        stored = PerHeadTokens(prompt.k, prompt.v, positions)
        scored = jax.lax.stop_gradient((stored, stored, prompt.count[:, None], state.statistics))
        return self.scorer.score(spec, ScoredTokens(*scored, state.rng, self.ends))

    @property
    def leaves(self) -> CompressedState:
        like = ring.DENSE_LEAVES if self.every is None else ring.LEAVES
        exact = ring.leaves(self.storage, self.ends.sinks, like)
        leaves = LEAVES._replace(dense=exact, statistics=self.scorer.statistics_leaves)
        if self.layer_budgets is not None:
            leaves = leaves._replace(head_budgets=Leaf("B K"))
        if self.rows_of_layer:
            sample, weight = per_layer.leaves(self.storage), Leaf("B I R")
            return leaves._replace(sample=sample, log_weight=weight)
        return leaves._replace(sample=per_head.leaves(self.storage))

    @property
    def rows_of_layer(self) -> bool:
        """Whether KV heads have unequal budgets, so that the rows of all are together."""
        return self.budgets != "equal"

    @property
    def heads_coupled(self) -> bool:
        return self.rows_of_layer

    @property
    def grows(self) -> bool:
        return self.every is None

    @property
    def min_prompt(self) -> int | None:
        smallest = self.budget if self.layer_budgets is None else self.layer_budgets.smallest
        return self.ends.max_tokens + smallest + 1 if self.every is None else None

    @property
    def cache_relative(self) -> bool:
        return self.every is not None and self.positions != "absolute"

    @property
    def max_lookback(self) -> int | float:
        if not self.cache_relative:
            return math.inf
        return self.ends.max_tokens + self.budget + self.every

    def for_layer(self, layer: int, num_layers: int) -> CompressionPolicy:
        if self.calibration is None:
            return self
        budgets = head_shares.budgets(self.calibration, num_layers, self.budget)
        return replace(self, layer_budgets=budgets[layer])

    @property
    def program(self) -> CompressionPolicy:
        if self.calibration is None or self.layer_budgets is None:
            return self
        return replace(self, layer_budgets=replace(self.layer_budgets, by_head=()))

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> CompressedState:
        layer_budgets, head_budgets = self.layer_budgets, ()
        if self.budgets == "calibrated":
            check_head_budgets(spec, layer_budgets)
        if layer_budgets is not None:
            # Where they are not known yet, -1 gives NaN, as compiled code cannot raise.
            heads = jnp.asarray(layer_budgets.by_head or (-1,), jnp.int32)
            head_budgets = jnp.broadcast_to(heads, (batch, spec.kv_heads))
        slots, size = self.start, 0
        if self.every is not None:
            slots = self.ends.max_tokens + self.every
            size = self.budget * (spec.kv_heads if self.rows_of_layer else 1)
            size = size if layer_budgets is None else layer_budgets.total
        storage = per_layer if self.rows_of_layer else per_head
        sample = storage.init(spec, batch, size, self.storage)
        return CompressedState(
            ring.init(spec, batch, slots, self.storage, self.ends.sinks),
            sample,
            jnp.full(sample.positions.shape, -jnp.inf, jnp.float32),
            self.scorer.statistics(spec, batch),
            draws.seeds(rng, spec, batch),
            head_budgets,
        )

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        return contract.nbytes(contract.shapes_of_prompt(self, spec, tokens))

    def reserve(self, spec: Spec, state: CompressedState, tokens: int) -> CompressedState:
        """Room for `tokens`; after prefill for that many generated tokens, beside the ends."""
        if self.every is not None:
            return state
        ends = self.ends.max_tokens if prefill_finished(state) else 0
        room = max(0, state.dense.positions.shape[1] - ends)  # which doubles, and not the ends
        size = ends + rows.slots_for(tokens, room, rows.MAX_SLOTS - ends)
        return state._replace(dense=ring.grow(state.dense, size))

    def update(
        self, spec: Spec, state: CompressedState, chunk: Chunk
    ) -> tuple[Partial, CompressedState]:
        """Attend to all cached tokens and the compressed prompt; append the chunk."""
        if self.every is not None:
            size = min(self.every, _PIECE)
            return chunked_scan(partial(self._update_piece, spec), state, chunk, size)
        if prefill_finished(state) and state.dense.positions.shape[1] <= self.ends.max_tokens:
            raise UserError(
                "reserve must be called after finish_prefill, got a state without that; call "
                "state = policy.reserve(spec, state, tokens) for the tokens to come"
            )
        attended, appended = ring.update(spec, state.dense, chunk, ring.dense_settings(state.dense))
        if prefill_finished(state):
            of_sample = self._attend_sample(spec, chunk, state.sample, state.log_weight)
            return merge(attended, of_sample), state._replace(dense=appended)
        return attended, self._observe(spec, state, chunk)._replace(dense=appended)

    def _observe(self, spec: Spec, state: CompressedState, chunk: Chunk) -> CompressedState:
        """The state with the statistics of a chunk. They have no gradient, as choices have none."""
        chunk = jax.lax.stop_gradient(chunk)
        return state._replace(statistics=self.scorer.observe(spec, state.statistics, chunk))

    def _attend_sample(
        self,
        spec: Spec,
        chunk: Chunk,
        sample: PerHeadTokens | PerLayerTokens,
        log_weight: Float32[Array, "B X C"],
    ) -> Partial:
        """Attention of the tokens of a chunk to the compressed prompt."""
        if self.rows_of_layer:
            return per_layer.attend(spec, chunk, sample, log_weight)
        visible = chunk.valid[:, None, :, None]
        bias = jnp.where(visible, log_weight[:, :, None], -jnp.inf)
        return per_head.attend(spec, chunk.q, chunk.positions, sample, bias)

    def _update_piece(
        self, spec: Spec, state: CompressedState, chunk: Chunk
    ) -> tuple[Partial, CompressedState]:
        """At most `every` tokens.

        Compressions come at `capacity` tokens, and every so many before and after. Those up to
        `capacity` evict nothing under equal budgets.
        """
        empty = ~jnp.any(state.log_weight > -jnp.inf, axis=(1, 2))
        between = jnp.where(empty, (self.budget - 1) % self.every + 1, self.every)
        room = self.ends.max_tokens + between - state.dense.count
        compress_full = partial(self._compress_full, spec, between)
        return repeated.in_two_passes(
            state, chunk, room, partial(self._absorb, spec), compress_full
        )

    def _absorb(
        self, spec: Spec, state: CompressedState, chunk: Chunk
    ) -> tuple[Partial, CompressedState]:
        """Attend to all cached tokens and append the chunk, which has room."""
        exact, sample = state.dense, state.sample
        if self.cache_relative:
            appended = ring.write(spec, exact, chunk, ring.dense_settings(exact))
            sampled = repeated.find_sampled(sample, state.log_weight, exact.k.shape[1])
            places = repeated.cache_positions(appended, sampled, self.budget)
            sinks = self.ends.sinks
            attended = repeated.attend_exact(spec, exact, appended, chunk, sinks, places)
            sample = repeated.sample_at_cache_positions(spec, sample, sampled, places, sinks)
        else:
            attended, appended = ring.update(spec, exact, chunk, ring.dense_settings(exact))
        attended = merge(attended, self._attend_sample(spec, chunk, sample, state.log_weight))
        return attended, self._observe(spec, state, chunk)._replace(dense=appended)

    def _compress_full(
        self, spec: Spec, between: Int32[Array, " B"], state: CompressedState, full: Array
    ) -> CompressedState:
        """Compress the sample and the tokens between the ends, in the sequences that are full."""
        exact, sample, ends, heads = state.dense, state.sample, self.ends, state.dense.k.shape[1]
        sampled = repeated.find_sampled(sample, state.log_weight, heads)
        largest = self.budget if self.layer_budgets is None else self.layer_budgets.largest
        if self.budgets == "adaptive":  # a head has at most what the safeguards of the others leave
            largest += (self.budget - self.budget // SAFEGUARD) * (heads - 1)
        size = exact.positions.shape[1] + largest
        stored = seen = repeated.in_order(exact, sample, sampled, ends.sinks, size)
        if self.cache_relative:
            places = repeated.cache_positions(exact, sampled, self.budget)
            seen = repeated.at_cache_positions(spec, stored, sampled, places, ends.sinks)
        count = exact.count[:, None] + sampled.count
        scored = ScoredTokens(
            *jax.lax.stop_gradient((stored, seen, count, state.statistics)), state.rng, ends
        )
        score = self.scorer.score(spec, scored)
        tokens = jax.tree.map(lambda leaf: leaf[:, :, scored.slots], stored)
        new = self.keep_best(state, tokens, scored.num_between, score)
        column = lambda leaf: full.reshape(-1, *[1] * (leaf.ndim - 1))
        sample, log_weight = jax.tree.map(
            lambda new, old: jnp.where(column(old), new, old), new, (sample, state.log_weight)
        )
        exact = repeated.keep_ends(exact, ends.sinks, ends.window, between, full)
        return state._replace(dense=exact, sample=sample, log_weight=log_weight)

    def cached(self, spec: Spec, state: CompressedState) -> Cached:
        exact, sample = ring.cached(state.dense), Cached(state.sample.positions, state.log_weight)
        if self.rows_of_layer:
            sample = per_layer.cached(state.sample, state.log_weight, spec.kv_heads)
        return Cached(*(jnp.concatenate(pair, axis=2) for pair in zip(exact, sample, strict=True)))

    def finish_prefill(self, spec: Spec, state: CompressedState) -> CompressedState:
        if self.every is not None:
            return state
        return compress(state, self.ends, partial(self.choose, spec, state))


def check_every(policy: CompressionPolicy) -> None:
    """Raise UserError for an impossible `every`, and for fields that belong to the other form."""
    if policy.every is None:
        if policy.positions is not None:
            raise UserError(
                f"positions={policy.positions} belongs to every=N, because a compressed prompt has "
                "the positions of the text; leave it out, or try every=128"
            )
        return
    if not 1 <= policy.every <= rows.MAX_SLOTS - policy.capacity:
        raise UserError(
            f"every must be from 1 to {rows.MAX_SLOTS - policy.capacity} tokens, got "
            f"{policy.every}; try every=128"
        )
    check_choice("positions", policy.positions or "relative", ("relative", "absolute"))
    default = next(field.default for field in fields(policy) if field.name == "start")
    if policy.start != default:
        raise UserError(
            f"start={policy.start} belongs to a cache that grows, and with every={policy.every} it "
            "has a constant size; leave start out, or give every=none"
        )


def check_capacity(capacity: int, start: int, **ends: int) -> None:
    """Raise UserError for a capacity that leaves no token beside the ends, or bad first slots.

    ends: the fields of the policy that are part of its capacity, such as sinks and window.
    """
    minimum = sum(ends.values()) + 1
    if not (minimum <= capacity <= rows.MAX_SLOTS and 1 <= start <= rows.MAX_SLOTS):
        named = " and ".join(f"{name}={size}" for name, size in ends.items())
        beside = f" beside {named}," if ends else ""
        raise UserError(
            f"capacity must be from {minimum}{beside} and start from 1, both {rows.MAX_SLOTS} at "
            f"most, got {capacity} and {start}; try capacity=1024,start=512"
        )


def check_ends(ends: ExactEnds, start: int, example: str = "sinks=4,window=32") -> None:
    """Raise UserError for impossible ends or first slots. example: valid settings."""
    rows.check_sizes(ends.sinks, ends.window, start, f"{example},start=512")


def check_rounds(rounds: int) -> None:
    """Raise UserError unless a prompt is halved 1 to 10 times."""
    if not 1 <= rounds <= 10:
        raise UserError(f"rounds must be from 1 to 10, got {rounds}; try rounds=2")


def check_head_budgets(spec: Spec, layer_budgets: LayerBudgets | None) -> None:
    """Raise UserError unless every KV head has a calibrated budget, or the state has them."""
    heads = () if layer_budgets is None else layer_budgets.by_head
    if layer_budgets is None or (heads and len(heads) != spec.kv_heads):
        raise UserError(
            f"budgets=calibrated needs a budget for each of {spec.kv_heads} KV heads, got "
            f"{len(heads)}; call for_layer(layer, num_layers) with calibration= of this model"
        )


def check_group(spec: Spec) -> None:
    """Raise UserError where the number of query heads of a KV head is unknown."""
    if spec.group is None:
        raise UserError(
            "this policy stores queries, so it must know how many heads share a KV head; give "
            "Spec(group=...)"
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
    else:
        chosen, weight = state.sample, state.log_weight
    if weight.shape[2] == 0:  # one empty slot: its presence says that prefill is finished
        chosen = resize(chosen, 1)
        weight = jnp.full(chosen.positions.shape, -jnp.inf, jnp.float32)
    slot = jnp.arange(min(ends.max_tokens, size))[None]
    source = jnp.where(slot < ends.sinks, slot, slot + count[:, None])
    source = jnp.minimum(source, size - 1)
    take = lambda leaf: jnp.take_along_axis(leaf, source[:, None, :, None], axis=2)
    exact = Ring(
        *jax.tree.map(take, prompt[:2]),
        jnp.take_along_axis(prompt.positions, source, axis=1),
        # An overfull sequence stays overfull.
        jnp.where(prompt.count > size, rows.OVERFULL, prompt.count - count),
        prompt.exact_sinks,
    )
    empty = jax.tree.map(lambda a: a[:, :, :0] if a.ndim > 2 else a[:, :0], state.statistics)
    return state._replace(dense=exact, sample=chosen, log_weight=weight, statistics=empty)


def weighted_sample(
    chosen: PerHeadTokens, count: Int32[Array, "B ..."], weight: float | Array
) -> Chosen:
    """A sample whose first `count` [B,#K] slots are filled, each with this log weight."""
    filled = _first(count, chosen.positions.shape[2])
    weight = jnp.where(filled, jnp.float32(weight), -jnp.inf)
    return chosen, jnp.broadcast_to(weight, chosen.positions.shape)


def _first(count: Int32[Array, "B ..."], size: int) -> Bool[Array, "#B #K S"]:
    """Whether each of `size` slots is one of the first `count` [B,#K]."""
    return jnp.arange(size)[None, None] < count.reshape(count.shape[0], -1, 1)


def keep_best(
    tokens: PerHeadTokens,
    count: Int32[Array, "B ..."],
    score: Float32[Array, "B K S"],
    budget: int,
) -> Chosen:
    """The highest `budget` scores of each KV head, in the order of the text.

    count: only the first [B,#K] tokens are scored.
    """
    size = tokens.positions.shape[2]
    budget = min(size, budget)
    valid = _first(count, size)
    _, best = jax.lax.top_k(jnp.where(valid, score, -jnp.inf), budget)
    taken = jnp.sort(jnp.where(jnp.take_along_axis(valid, best, 2), best, size), axis=2)
    taken = jnp.minimum(taken, size - 1).astype(jnp.int32)
    return weighted_sample(per_head.pick(tokens, taken), jnp.minimum(count, budget), 0.0)


def resize(tokens: PerHeadTokens | PerLayerTokens, size: int) -> PerHeadTokens | PerLayerTokens:
    """The first `size` slots, padded with empty ones where there are fewer."""
    padding = max(0, size - tokens.positions.shape[2])
    pad = lambda leaf: jnp.pad(leaf, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (leaf.ndim - 3))
    return jax.tree.map(lambda leaf: pad(leaf)[:, :, :size], tokens)
