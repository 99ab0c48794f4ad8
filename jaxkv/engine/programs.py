"""The programs of the engine. All are compiled at its creation, none while it serves.

A prompt is prefilled alone and in fixed chunks, so that its state depends on nothing but its own
tokens. The finished prefill is then inserted into the decode batch. The whole batch decodes
together, also if few entries are active, so that no sequence affects the bits of another.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, State
from jaxkv.engine.model import Model, forward
from jaxkv.sampling import NEUTRAL, Knobs, draw_each
from jaxkv.state import memory
from jaxkv.state.batch import nbytes
from jaxkv.state.loop_carry import flatten_heads, restore_heads
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32

MAX_LOGPROBS = 20  # likeliest tokens that a request may ask for
PREFILLS = 2  # in memory at a time: one may begin before the last one is inserted


class PrefillState(NamedTuple):
    """The state of one prompt before the end of prefill. logits: of the next token."""

    states: tuple[State, ...]
    logits: Float32[Array, "1 V"]


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


class StepOutput(NamedTuple):
    """The output of a step for M sequences, or for M prompt tokens.

    token, logprob: each token and its log probability. top, top_logprobs: the likeliest tokens and
    theirs. finite: whether the logits were finite.
    """

    token: Int32[Array, " M"]
    logprob: Float32[Array, " M"]
    top: Int32[Array, "M 20"]
    top_logprobs: Float32[Array, "M 20"]
    finite: Bool[Array, " M"]


def init_prefill(model: Model, max_len: int | None, seed: UInt32[Array, ""]) -> PrefillState:
    """An empty state for up to max_len tokens. seed: of the policies' random draws."""
    rng = jax.random.key(seed)

    def state(layer: int, policy: Policy) -> State:
        one = policy.init(model.spec, 1, jax.random.fold_in(rng, layer))
        return one if max_len is None else policy.reserve(model.spec, one, max_len)

    states = tuple(state(layer, policy) for layer, policy in enumerate(model.policies))
    return PrefillState(states, jnp.zeros((1, model.vocab), jnp.float32))


def begin_chunk(
    model: Model,
    weights: Any,
    tokens: Int32[Array, "1 T"],
    start: UInt32[Array, ""],
    count: Int32[Array, ""],
) -> tuple[Array, UInt32[Array, "1 T"], Bool[Array, "1 T"]]:
    """The input of the first layer, positions, and which tokens are valid: the first `count`."""
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return model.embed(weights, tokens), start + index.astype(jnp.uint32), index < count


def end_chunk(
    model: Model,
    scored: bool,
    weights: Any,
    x: Array,
    before: Float32[Array, "1 V"],
    tokens: Int32[Array, "1 T"],
    count: Int32[Array, ""],
) -> tuple[Float32[Array, "1 V"], StepOutput | None]:
    """The logits after a chunk; scored: also each token's scores. before: the logits before it.

    Nothing predicts the first token of a prompt, so its scores are meaningless.
    """
    if not scored:
        return model.head(weights, x, jnp.reshape(count - 1, (1, 1)))[:, 0], None
    logits = model.head(weights, x, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])
    last = jax.lax.dynamic_slice_in_dim(logits, count - 1, 1, axis=1)[:, 0]
    return last, _score(jnp.concatenate([before, logits[0, :-1]]), tokens[0], True)


def carry(batch: DecodeBatch) -> DecodeBatch:
    """The batch in the form that stays on the device between calls.

    XLA:CPU copies the caches of a single sequence whole in every step if B and K are two axes.
    Record workarounds, row carry.
    """
    if batch.token.shape[0] > 1:
        return batch
    return batch._replace(states=flatten_heads(batch.states, sharded=False))


def restore(batch: DecodeBatch, like: DecodeBatch) -> DecodeBatch:
    """The inverse of `carry`; like: the shapes of the result."""
    if batch.token.shape[0] > 1:
        return batch
    return batch._replace(states=restore_heads(batch.states, like.states))


def insert(
    model: Model,
    max_len: int | None,
    like: DecodeBatch,
    batch: DecodeBatch,
    index: Int32[Array, ""],
    state: PrefillState,
    params: SequenceParams,
) -> tuple[DecodeBatch, StepOutput]:
    """Finish a prefill, insert it as batch entry `index` and sample its first token.

    like: the shapes of an `empty_batch`, of which `batch` is the `carry`.
    """
    states = tuple(_finish_prefill(model, max_len, *each) for each in model.layers(state.states))
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
    batch = restore(batch, like)
    batch = jax.tree.map(lambda all, one: all.at[index].set(one[0]), batch, sequence)
    return carry(batch), output


def decode(
    model: Model,
    like: DecodeBatch,
    weights: Any,
    batch: DecodeBatch,
    active: Bool[Array, " B"],
    scored: Bool[Array, ""],
) -> tuple[DecodeBatch, StepOutput]:
    """Feed each active sequence its token and sample the next; other sequences do not change.

    like: as in `insert`.
    """
    batch = restore(batch, like)
    logits, states = forward(
        model, weights, batch.token[:, None], batch.position[:, None], active[:, None],
        batch.states, jnp.zeros((batch.token.shape[0], 1), jnp.int32),
    )  # fmt: skip
    fed = batch._replace(states=states, position=batch.position + active.astype(jnp.uint32))
    fed, output = _sample(fed, logits[:, 0], active, scored)
    return carry(fed), output


def set_bias(
    batch: DecodeBatch, index: Int32[Array, ""], bias: Float32[Array, "1 V"]
) -> DecodeBatch:
    """Replace the bias of one batch entry."""
    return batch._replace(bias=batch.bias.at[index].set(bias[0]))


def empty_batch(model: Model, max_batch: int, max_len: int | None) -> DecodeBatch:
    """A decode batch without active sequences."""

    def sequence(_: None) -> tuple[State, ...]:
        state = init_prefill(model, max_len, jnp.uint32(0))
        return tuple(_finish_prefill(model, max_len, *each) for each in model.layers(state.states))

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
    model: Model, max_len: int | None, _: int, policy: Policy, state: State
) -> State:
    if policy.min_prompt is None:
        return state
    state = policy.finish_prefill(model.spec, state)
    if max_len is None:
        return state
    return policy.reserve(model.spec, state, max_len)  # counts tokens from the end of prefill on


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
    return sampled, _score(logits, token, scored)


def _score(
    logits: Float32[Array, "M V"], token: Int32[Array, " M"], scored: Bool[Array, ""] | bool
) -> StepOutput:
    """The tokens with their log probabilities, which are computed only if `scored`."""

    def compute() -> tuple[Array, Array, Array]:
        logprobs = jax.nn.log_softmax(logits)
        best, top = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
        own = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
        return own, top.astype(jnp.int32), best

    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(compute))
    own, top, best = jax.lax.cond(scored, compute, lambda: nothing)
    return StepOutput(token, own, top, best, jnp.isfinite(jnp.max(logits, axis=1)))


@functools.cache
def compilations() -> Counter[str]:
    """The number of compilations in this process since the first call."""
    counted: Counter[str] = Counter()

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counted["all"] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counted


class ChunkPrograms(NamedTuple):
    """The programs of prefill for one width of chunk. layers: by policy. ends: by `scored`."""

    begin: Callable | Future
    layers: dict[Policy, Callable | Future]
    ends: dict[bool, Callable | Future]

    def result(self) -> ChunkPrograms:
        """The programs, once they are compiled."""
        layers = {policy: future.result() for policy, future in self.layers.items()}
        ends = {scored: future.result() for scored, future in self.ends.items()}
        return ChunkPrograms(self.begin.result(), layers, ends)


class Programs:
    """All programs of one engine, compiled for its shapes.

    widths: to which a piece of a prompt is padded; the last is the chunk. prefill_shapes,
    prefill_bytes: of a PrefillState. bytes: of `prefills` of them and of the decode batch.
    num_compiled: the number of programs. Raises UserError if the batch does not fit into memory.
    """

    def __init__(
        self, model: Model, max_batch: int, max_len: int | None, widths: Sequence[int],
        prefills: int = PREFILLS,
    ) -> None:  # fmt: skip
        self.model, self.widths = model, tuple(widths)
        self.weights = model.weights
        zero = np.int32(0)
        state = jax.eval_shape(lambda: init_prefill(model, max_len, jnp.uint32(0)))
        like = jax.eval_shape(lambda: empty_batch(model, max_batch, max_len))
        batch = jax.eval_shape(carry, like)
        params = SequenceParams(
            np.zeros(1, "u4"), np.zeros(1, "u4"),
            Knobs(*(np.zeros(1, dtype) for dtype in ("f4", "i4", "f4", "f4", "f4"))),
            np.zeros((1, model.vocab), bool), np.zeros((1, 2), "f4"),
            np.zeros((1, model.vocab), "f4"),
        )  # fmt: skip
        self.prefill_shapes, self.prefill_bytes = state, nbytes(state)
        self.num_compiled, self._lock = 0, threading.Lock()
        self.bytes = nbytes(batch) + prefills * self.prefill_bytes
        # Before minutes of compilation.
        length = "" if max_len is None else f" of {max_len} tokens"
        memory.check(self.bytes, f"{max_batch} sequences and {prefills} prefills{length}")
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            begin = partial(threads.submit, self.compile)
            decoding = begin(
                partial(decode, model, like), model.weights, batch, np.zeros(max_batch, bool),
                np.bool_(False), donate=(1,),
            )  # fmt: skip
            chunks = {width: self._begin_prefill(begin, width) for width in self.widths}
            inserting = begin(
                partial(insert, model, max_len, like), batch, zero, state, params, donate=(0,)
            )
            biasing = begin(set_bias, batch, zero, params.bias, donate=(0,))
            empty = begin(lambda: carry(empty_batch(model, max_batch, max_len)))
            init = begin(partial(init_prefill, model, max_len), np.uint32(0))
        self.decode, self.insert = decoding.result(), inserting.result()
        self.set_bias = biasing.result()
        self.empty_batch, self.init_prefill = empty.result(), init.result()
        self._prefill = {width: programs.result() for width, programs in chunks.items()}

    def compile(self, function: Callable, *shapes: Any, donate: tuple[int, ...] = ()) -> Callable:
        """Compile a program for arguments of these shapes; donate: the arguments to donate."""
        with self._lock:
            self.num_compiled += 1
        return jax.jit(function, donate_argnums=donate).lower(*shapes).compile()

    def padded(self, count: int) -> int:
        """The width to which a chunk of `count` tokens is padded."""
        return next(width for width in self.widths if count <= width)

    def _begin_prefill(self, begin: Callable[..., Future], width: int) -> ChunkPrograms:
        """Begin to compile the prefill of a chunk: once for all layers with one policy."""
        model, state = self.model, self.prefill_shapes
        tokens, one, zero = np.zeros((1, width), "i4"), np.uint32(0), np.int32(0)
        start = partial(begin_chunk, model)
        x, positions, valid = jax.eval_shape(start, model.weights, tokens, one, zero)
        first = {layer[1]: layer for layer in reversed(model.layers(state.states))}
        layers = {
            policy: begin(
                partial(model.layer, policy), model.layer_weights(model.weights, number), x, one,
                positions, valid, donate=(1, 2),
            )
            for number, policy, one in first.values()
        }  # fmt: skip
        ends = {
            scored: begin(
                partial(end_chunk, model, scored), model.weights, x, state.logits, tokens, zero
            )
            for scored in (False, True)
        }
        return ChunkPrograms(begin(start, model.weights, tokens, one, zero), layers, ends)

    def prefill(
        self,
        scored: bool,
        state: PrefillState,
        tokens: Int32[np.ndarray, "1 T"],
        start: int,
        count: int,
    ) -> tuple[PrefillState, StepOutput | None]:
        """Prefill the first `count` tokens of a chunk; scored: also return each token's scores."""
        programs, weights = self._prefill[tokens.shape[1]], self.weights
        x, positions, valid = programs.begin(weights, tokens, np.uint32(start), np.int32(count))
        states = []
        for number, policy, one in self.model.layers(state.states):
            of_layer = self.model.layer_weights(weights, number)
            x, one = programs.layers[policy](of_layer, x, one, positions, valid)
            states.append(one)
        last, output = programs.ends[scored](weights, x, state.logits, tokens, np.int32(count))
        return PrefillState(tuple(states), last), output
