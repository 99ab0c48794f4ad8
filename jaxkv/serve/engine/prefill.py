"""The prefill of one prompt: a prompt is prefilled alone, in chunks of a few fixed widths.

So its state depends on nothing but its own tokens. A chunk passes through one program per layer,
which all layers of one program share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy, State
from jaxkv.serve.engine.model import LayerFunction, Model, StepOutput, score
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32


class PrefillState(NamedTuple):
    """The state of one prompt before the end of prefill. logits: those of the next token."""

    states: tuple[State, ...]
    logits: Float32[Array, "1 V"]


def policy_seed(seed: int, salt: str | None) -> np.uint32:
    """The seed of the policies' random draws, equal for all requests of one salt."""
    data = f"{seed}:".encode() + (b"" if salt is None else b"salt:" + salt.encode())
    return np.frombuffer(hashlib.sha256(data).digest()[:4], "<u4")[0]


def init_prefill(model: Model, max_len: int | None, seed: UInt32[Array, ""]) -> PrefillState:
    """An empty state for up to max_len tokens. seed: start of the policies' random draws."""
    rng = jax.random.key(seed)

    def state(layer: int, policy: Policy) -> State:
        spec = model.specs[layer]
        layer_state = policy.init(spec, 1, jax.random.fold_in(rng, layer))
        return layer_state if max_len is None else policy.reserve(spec, layer_state, max_len)

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
    return last, score(jnp.concatenate([before, logits[0, :-1]]), tokens[0], True)


class ChunkPrograms(NamedTuple):
    """The programs of prefill for one width of chunk.

    layers: by the function of a layer and its `Policy.program`. ends: by `scored`.
    """

    begin: Callable | Future
    layers: dict[tuple[LayerFunction, Policy], Callable | Future]
    ends: dict[bool, Callable | Future]

    def result(self) -> ChunkPrograms:
        """The programs, once they are compiled."""
        layers = {kind: future.result() for kind, future in self.layers.items()}
        ends = {scored: future.result() for scored, future in self.ends.items()}
        return ChunkPrograms(self.begin.result(), layers, ends)


class ChunkPrefill:
    """The prefill of one chunk, which may pause after any layer.

    state: its states are donated. count: tokens of the chunk that are valid. scored: also compute
    each token's scores.
    """

    def __init__(
        self,
        programs: ChunkPrograms,
        model: Model,
        scored: bool,
        state: PrefillState,
        tokens: Int32[np.ndarray, "1 T"],
        start: int,
        count: int,
    ) -> None:
        self._programs, self._model, self._scored = programs, model, scored
        self._tokens, self.count = tokens, count
        self._before, self._states = state.logits, list(state.states)
        self._x, self._positions, self._valid = programs.begin(
            model.weights, tokens, np.uint32(start), np.int32(count)
        )
        self._done = 0

    @property
    def layers_left(self) -> int:
        return len(self._states) - self._done

    def run(self, layers: int) -> None:
        """Dispatch so many layers."""
        model = self._model
        for number in range(self._done, self._done + layers):
            layer = self._programs.layers[model.functions[number], model.programs[number]]
            self._x, self._states[number] = layer(
                model.layer_weights(model.weights, number),
                self._x,
                self._states[number],
                self._positions,
                self._valid,
            )
        self._done += layers

    def end(self) -> tuple[PrefillState, StepOutput | None]:
        """The state after the last layer, and the scores of the chunk's tokens or None."""
        last, output = self._programs.ends[self._scored](
            self._model.weights, self._x, self._before, self._tokens, np.int32(self.count)
        )
        return PrefillState(tuple(self._states), last), output


def submit_prefill(
    model: Model, submit: Callable[..., Future], state: PrefillState, width: int
) -> ChunkPrograms:
    """Start to compile the prefill of a chunk: once for all layers with one program.

    submit: starts to compile a function for arguments. state: the shapes of a state.
    """
    tokens, position, zero = np.zeros((1, width), "i4"), np.uint32(0), np.int32(0)
    start = partial(begin_chunk, model)
    x, positions, valid = jax.eval_shape(start, model.weights, tokens, position, zero)
    first = {
        (model.functions[layer[0]], layer[1]): layer
        for layer in reversed(model.layers(state.states))
    }
    layers = {
        (function, policy): submit(
            partial(function, policy),
            model.layer_weights(model.weights, number),
            x,
            layer_state,
            positions,
            valid,
            donate=(1, 2),
        )
        for (function, _), (number, policy, layer_state) in first.items()
    }
    ends = {
        scored: submit(
            partial(end_chunk, model, scored), model.weights, x, state.logits, tokens, zero
        )
        for scored in (False, True)
    }
    return ChunkPrograms(submit(start, model.weights, tokens, position, zero), layers, ends)
