"""The programs of the engine. All are compiled at its creation, none while it serves.

A finished prefill is inserted into the decode batch. The whole batch decodes together, also if few
entries are active, so that no sequence affects the bits of another. An engine may have batches of
several sizes and use the smallest that holds the running sequences: one sequence then does not take
the time of 16, but its last bits depend on the size, because a product of other shape adds up in
another order.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, State
from jaxkv.platform.cpu import flatten_heads, restore_heads
from jaxkv.platform.gpu import carries_shared_once
from jaxkv.sampling import NEUTRAL, Knobs, draw_each
from jaxkv.serve.engine.model import Model, StepOutput, forward, score
from jaxkv.serve.engine.placement import is_split, placed, shardings
from jaxkv.serve.engine.prefill import ChunkPrefill, PrefillState, init_prefill, submit_prefill
from jaxkv.state import memory
from jaxkv.state.sharding import bytes_per_device
from jaxkv.state.shared import deduplicate_shared, without_shared
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32

GROWTH = 4  # between two sizes of the decode batch
PREFILLS = 2  # in memory at a time: one may begin before the last one is inserted


class DecodeBatch(NamedTuple):
    """All sequences in decode, B of them. token: sampled but not yet fed, at `position`."""

    states: tuple[State, ...]
    token: Int32[Array, " B"]
    position: UInt32[Array, " B"]
    rng: UInt32[Array, "B 2"]
    knobs: Knobs
    seen: Bool[Array, "B V"]  # tokens of the sequence, for the repetition penalty
    counts: Int32[Array, "B V"]  # of generated tokens, for the other penalties
    penalties: Float32[Array, "B 2"]  # presence, frequency
    bias: Float32[Array, "B V"]


class SequenceParams(NamedTuple):
    """The parameters with which a sequence enters the decode batch."""

    position: UInt32[Array, " 1"]
    seed: UInt32[Array, " 1"]
    knobs: Knobs
    seen: Bool[Array, "1 V"]
    penalties: Float32[Array, "1 2"]
    bias: Float32[Array, "1 V"]


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """The sizes of a batch that grows: 1, 4, 16 and so on to half of max_batch, and max_batch."""
    sizes = [1]
    while 2 * GROWTH * sizes[-1] <= max_batch:
        sizes.append(GROWTH * sizes[-1])
    return (*sizes, max_batch) if max_batch > 1 else (1,)


def padded_widths(chunk: int) -> tuple[int, ...]:
    """The widths to which a piece of a prompt is padded, so that few shapes are compiled."""
    return (*(width for width in (16, 64, 256, 1024) if width < chunk), chunk)


def carry(model: Model, states: tuple[State, ...]) -> tuple[State, ...]:
    """The states of a batch in the form that stays on the device between calls.

    XLA:CPU copies the caches of a single sequence whole in every step if B and K are two axes.
    Measured in evals/results/workarounds.json, row carry.
    """
    if jax.tree.leaves(states)[0].shape[0] == 1:
        states = flatten_heads(states, sharded=is_split(model))
    return without_shared(model.programs, states) if _once(model) else states


def restore(model: Model, states: tuple[State, ...], like: tuple[State, ...]) -> tuple[State, ...]:
    """The inverse of `carry`; like: the shapes of the result."""
    states = deduplicate_shared(model.programs, states) if _once(model) else states
    return restore_heads(states, like)


def carry_batch(model: Model, batch: DecodeBatch) -> DecodeBatch:
    """A batch as it stays on the device between calls."""
    return batch._replace(states=carry(model, batch.states))


def _once(model: Model) -> bool:
    """Whether the batch has arrays that layers share once. `shardings` knows whole states alone."""
    return carries_shared_once() and not is_split(model)


def insert(
    model: Model,
    max_len: int | None,
    like: tuple[State, ...],
    batch: DecodeBatch,
    index: Int32[Array, ""],
    state: PrefillState,
    params: SequenceParams,
) -> tuple[DecodeBatch, StepOutput]:
    """Finish a prefill, insert it as batch entry `index` and sample its first token.

    like: the shapes of the states in an `empty_batch`.
    """
    states = tuple(_finish_prefill(model, max_len, *layer) for layer in model.layers(state.states))
    rng = jax.random.key(params.seed[0])
    sequence = DecodeBatch(
        states=states,
        token=jnp.zeros(1, jnp.int32),
        position=params.position,
        rng=jax.random.key_data(jax.random.split(rng)[0])[None],
        knobs=params.knobs,
        seen=params.seen,
        counts=jnp.zeros((1, model.vocab), jnp.int32),
        penalties=params.penalties,
        bias=params.bias,
    )
    sequence, output = _sample(sequence, state.logits, jnp.ones(1, bool), True)
    batch = batch._replace(states=restore(model, batch.states, like))
    batch = jax.tree.map(lambda all, new: all.at[index].set(new[0]), batch, sequence)
    return carry_batch(model, batch), output


def feed(
    model: Model,
    like: tuple[State, ...],
    weights: Any,
    states: tuple[State, ...],
    token: Int32[Array, " B"],
    position: UInt32[Array, " B"],
    active: Bool[Array, " B"],
) -> tuple[tuple[State, ...], Float32[Array, "B V"]]:
    """Feed each active sequence its token; returns the states and the logits of the next token.

    The states of other sequences do not change. like: as in `insert`.
    """
    logits, states = forward(
        model,
        weights,
        token[:, None],
        position[:, None],
        active[:, None],
        restore(model, states, like),
        jnp.zeros((token.shape[0], 1), jnp.int32),
    )
    return carry(model, states), logits[:, 0]


def sample(
    batch: DecodeBatch,
    logits: Float32[Array, "B V"],
    active: Bool[Array, " B"],
    scored: Bool[Array, ""],
) -> tuple[DecodeBatch, StepOutput]:
    """Sample the next token of each active sequence, which `feed` fed. batch: without its states.

    A program of its own, so that the host computes the masks of matchers while `feed` runs.
    """
    fed = batch._replace(position=batch.position + active.astype(jnp.uint32))
    return _sample(fed, logits, active, scored)


def set_bias(
    biases: Float32[Array, "B V"], index: Int32[Array, ""], bias: Float32[Array, "1 V"]
) -> Float32[Array, "B V"]:
    """Replace the bias of one batch entry."""
    return biases.at[index].set(bias[0])


def empty_batch(model: Model, max_batch: int, max_len: int | None) -> DecodeBatch:
    """A decode batch without active sequences."""

    def sequence(_: None) -> tuple[State, ...]:
        state = init_prefill(model, max_len, jnp.uint32(0))
        return tuple(
            _finish_prefill(model, max_len, *layer) for layer in model.layers(state.states)
        )

    shapes = jax.eval_shape(sequence, None)
    states = jax.tree.map(lambda leaf: jnp.zeros((max_batch, *leaf.shape[1:]), leaf.dtype), shapes)
    return DecodeBatch(
        states=states,
        token=jnp.zeros(max_batch, jnp.int32),
        position=jnp.zeros(max_batch, jnp.uint32),
        rng=jnp.zeros((max_batch, 2), jnp.uint32),
        knobs=Knobs(*(jnp.zeros(max_batch, dtype) for dtype in ("f4", "i4", "f4", "f4", "f4"))),
        seen=jnp.zeros((max_batch, model.vocab), bool),
        counts=jnp.zeros((max_batch, model.vocab), jnp.int32),
        penalties=jnp.zeros((max_batch, 2), jnp.float32),
        bias=jnp.zeros((max_batch, model.vocab), jnp.float32),
    )


def _finish_prefill(
    model: Model, max_len: int | None, number: int, policy: Policy, state: State
) -> State:
    if policy.min_prompt is None:
        return state
    state = model.finish_prefill(number, policy, state)
    if max_len is None:
        return state
    # It counts tokens from the end of prefill on.
    return policy.reserve(model.specs[number], state, max_len)


def _sample(
    batch: DecodeBatch,
    logits: Float32[Array, "B V"],
    active: Bool[Array, " B"],
    scored: Bool[Array, ""] | bool,
) -> tuple[DecodeBatch, StepOutput]:
    """Sample the next token of each active sequence."""
    presence, frequency = batch.penalties[:, :1], batch.penalties[:, 1:]
    counts = batch.counts.astype(jnp.float32)
    penalized = logits + batch.bias - jnp.where(counts > 0, presence, 0) - frequency * counts
    # An entry of the batch keeps the knobs of its last sequence, which would choose the branch.
    knobs = jax.tree.map(lambda knob, off: jnp.where(active, knob, off), batch.knobs, NEUTRAL)
    # The draw depends on `position`, at which the token will be fed.
    token, _ = draw_each(knobs, penalized, batch.seen, batch.rng, batch.position)
    entries = jnp.arange(token.shape[0])
    sampled = batch._replace(
        token=jnp.where(active, token, batch.token),
        seen=batch.seen.at[entries, token].max(active),
        counts=batch.counts.at[entries, token].add(active.astype(jnp.int32)),
    )
    return sampled, score(logits, token, scored)


def submit_moves(
    submit: Callable[..., Future], batch: Any, size: int, into: Any, target_size: int
) -> list[Future]:
    """Start to compile `move` for each leaf of a batch; leaves of equal shapes share one.

    A single program for all leaves of 30 layers took longer to compile than a decode step.

    submit: starts to compile a function for arguments. batch, into: shapes of both batches, as they
    stay on the device. size, target_size: their sequences.
    """
    pairs = list(zip(jax.tree.leaves(batch), jax.tree.leaves(into), strict=True))
    function, order = partial(move, size, target_size), np.zeros(min(size, target_size), "i4")
    futures = {
        (leaf, to): submit(function, leaf, to, order, np.int32(0), donate=(1,), out=to.sharding)
        for leaf, to in {*pairs}
    }
    return [futures[pair] for pair in pairs]


def move(
    size: int,
    target_size: int,
    leaf: Array,
    into: Array,
    order: Int32[Array, " C"],
    count: Int32[Array, ""],
) -> Array:
    """Copy entries `order` of a leaf of `size` sequences to the first `count` ones of another leaf.

    C: the smaller size. Other entries of `into` do not change.
    """
    # In two dimensions XLA:CPU updates the array in place.
    rows = leaf.reshape(size, -1)

    def copy(number: Array, moved: Array) -> Array:
        return moved.at[number].set(rows[order[number]])

    return jax.lax.fori_loop(0, count, copy, into.reshape(target_size, -1)).reshape(into.shape)


@functools.cache
def compilations() -> Counter[str]:
    """The number of compilations in this process since the first call."""
    counted: Counter[str] = Counter()

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counted["all"] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counted


class BatchPrograms(NamedTuple):
    """The programs of a decode batch of one size.

    moves: by the size of another batch, `move` into each of its leaves.
    """

    empty: Callable | Future
    feed: Callable | Future
    sample: Callable | Future
    insert: Callable | Future
    set_bias: Callable | Future
    moves: dict[int, list[Callable | Future]]

    def result(self) -> BatchPrograms:
        """The programs, once they are compiled."""
        moves = {
            size: [future.result() for future in futures] for size, futures in self.moves.items()
        }
        return BatchPrograms(*(future.result() for future in self[:-1]), moves)


class Programs:
    """All programs of one engine, compiled for its shapes.

    sizes: entries of the decode batches, in order. widths: tokens in the chunks of a prompt.
    progress: called with (programs compiled, all programs).
    bytes: memory, on each device, of `prefills` prefills and of a decode batch of each size.
    num_compiled: the number of programs.
    Raises UserError if these bytes do not fit into memory.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sequence[int],
        max_len: int | None,
        widths: Sequence[int],
        prefills: int = PREFILLS,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.model, self.sizes = model, tuple(sizes)
        shapes = lambda make: placed(model, jax.eval_shape(make))
        state = shapes(lambda: init_prefill(model, max_len, jnp.uint32(0)))
        batches = {size: shapes(partial(empty_batch, model, size, max_len)) for size in self.sizes}
        self.prefill_shapes, self.prefill_bytes = state, bytes_per_device(state)
        self.num_compiled, self._lock = 0, threading.Lock()
        self.bytes = prefills * self.prefill_bytes
        self.bytes += sum(bytes_per_device(self._carried(batch)) for batch in batches.values())
        # Before minutes of compilation.
        length = "" if max_len is None else f" of {max_len} tokens"
        memory.check(self.bytes, f"{sum(sizes)} sequences and {prefills} prefills{length}")
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiling: list[Future] = []

            def submit(*arguments: Any, **options: Any) -> Future:
                compiling.append(threads.submit(self.compile, *arguments, **options))
                return compiling[-1]

            batch_programs = {
                size: self._submit_batch(submit, size, batches, max_len) for size in self.sizes
            }
            chunks = {width: submit_prefill(model, submit, state, width) for width in widths}
            init = submit(partial(init_prefill, model, max_len), np.uint32(0))
            if progress is not None:
                progress(0, len(compiling))
                for done, _ in enumerate(as_completed(compiling), 1):
                    progress(done, len(compiling))
        self.init_prefill = init.result()
        self.by_size = {size: programs.result() for size, programs in batch_programs.items()}
        self.chunks = {width: programs.result() for width, programs in chunks.items()}

    def compile(
        self,
        function: Callable,
        *shapes: Any,
        donate: tuple[int, ...] = (),
        out: Any = None,
    ) -> Callable:
        """Compile a program for arguments of these shapes; donate: the arguments to donate.

        Over several devices, outputs lie where `shardings` puts them, or where `out` says.
        """
        with self._lock:
            self.num_compiled += 1
        if is_split(self.model):
            shapes = placed(self.model, shapes)
            out = shardings(self.model, jax.eval_shape(function, *shapes)) if out is None else out
        jitted = jax.jit(function, donate_argnums=donate, out_shardings=out)
        return jitted.lower(*shapes).compile()

    def size_for(self, sequences: int) -> int:
        """The smallest size of the decode batch for so many sequences."""
        return next(size for size in self.sizes if sequences <= size)

    def empty_batches(self) -> dict[int, DecodeBatch]:
        """A decode batch of each size, without active sequences."""
        return {size: programs.empty() for size, programs in self.by_size.items()}

    def feed(
        self, batch: DecodeBatch, active: Bool[np.ndarray, " B"]
    ) -> tuple[DecodeBatch, Float32[Array, "B V"]]:
        """`feed` of a batch, whose states are donated; returns the batch and the logits."""
        program = self.by_size[batch.token.shape[0]].feed
        states, logits = program(
            self.model.weights, batch.states, batch.token, batch.position, active
        )
        return batch._replace(states=states), logits

    def sample(
        self,
        batch: DecodeBatch,
        logits: Float32[Array, "B V"],
        active: Bool[np.ndarray, " B"],
        scored: bool,
    ) -> tuple[DecodeBatch, StepOutput]:
        """`sample` of a batch, which is donated but for its states."""
        program = self.by_size[batch.token.shape[0]].sample
        sampled, output = program(batch._replace(states=()), logits, active, np.bool_(scored))
        return sampled._replace(states=batch.states), output

    def insert(
        self, batch: DecodeBatch, index: int, state: PrefillState, params: SequenceParams
    ) -> tuple[DecodeBatch, StepOutput]:
        """`insert` into a batch, which is donated."""
        return self.by_size[batch.token.shape[0]].insert(batch, np.int32(index), state, params)

    def set_bias(
        self, batch: DecodeBatch, index: int, bias: Float32[np.ndarray, "1 V"]
    ) -> DecodeBatch:
        """`set_bias` of a batch, whose biases are donated."""
        program = self.by_size[batch.token.shape[0]].set_bias
        return batch._replace(bias=program(batch.bias, np.int32(index), bias))

    def move(self, batch: DecodeBatch, entries: Sequence[int], into: DecodeBatch) -> DecodeBatch:
        """Copy entries of a batch to the beginning of another, which is donated."""
        size, target_size = batch.token.shape[0], into.token.shape[0]
        order = np.zeros(min(size, target_size), np.int32)
        order[: len(entries)] = entries
        count, leaves = np.int32(len(entries)), map(jax.tree.leaves, (batch, into))
        leaf_moves = zip(self.by_size[size].moves[target_size], *leaves, strict=True)
        moved = [move(leaf, to, order, count) for move, leaf, to in leaf_moves]
        return jax.tree.unflatten(jax.tree.structure(into), moved)

    def _submit_batch(
        self,
        submit: Callable[..., Future],
        size: int,
        batches: dict[int, DecodeBatch],
        max_len: int | None,
    ) -> BatchPrograms:
        """Start to compile the programs of one size of the decode batch; batches: shapes."""
        model, zero, like = self.model, np.int32(0), batches[size].states
        batch = self._carried(batches[size])
        params = SequenceParams(
            np.zeros(1, "u4"),
            np.zeros(1, "u4"),
            Knobs(*(np.zeros(1, dtype) for dtype in ("f4", "i4", "f4", "f4", "f4"))),
            np.zeros((1, model.vocab), bool),
            np.zeros((1, 2), "f4"),
            np.zeros((1, model.vocab), "f4"),
        )
        active = np.zeros(size, bool)
        feeding = submit(
            partial(feed, model, like),
            model.weights,
            batch.states,
            batch.token,
            batch.position,
            active,
            donate=(1,),
        )
        logits = placed(model, jax.ShapeDtypeStruct((size, model.vocab), jnp.float32))
        sampling = submit(
            sample, batch._replace(states=()), logits, active, np.bool_(False), donate=(0,)
        )
        inserting = submit(
            partial(insert, model, max_len, like),
            batch,
            zero,
            self.prefill_shapes,
            params,
            donate=(0,),
        )
        moves = {
            target_size: submit_moves(submit, batch, size, self._carried(into), target_size)
            for target_size, into in batches.items()
            if target_size != size
        }
        return BatchPrograms(
            submit(lambda: carry_batch(model, empty_batch(model, size, max_len))),
            feeding,
            sampling,
            inserting,
            submit(set_bias, batch.bias, zero, params.bias, donate=(0,)),
            moves,
        )

    def _carried(self, batch: DecodeBatch) -> DecodeBatch:
        """The shapes of a batch as it stays on the device."""
        return placed(self.model, jax.eval_shape(partial(carry_batch, self.model), batch))

    def padded(self, count: int) -> int:
        """The width to which a chunk of `count` tokens is padded."""
        return next(width for width in self.chunks if count <= width)

    def prefill(
        self,
        scored: bool,
        state: PrefillState,
        tokens: Int32[np.ndarray, "1 T"],
        start: int,
        count: int,
    ) -> ChunkPrefill:
        """Begin the prefill of the first `count` tokens of a chunk; scored: also their scores."""
        programs = self.chunks[tokens.shape[1]]
        return ChunkPrefill(programs, self.model, scored, state, tokens, start, count)
