"""A model that the engine can run, in the parts that it compiles, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxkv.contract import Policy, Spec, State
from jaxkv.serve.engine.request import MAX_LOGPROBS
from jaxkv.state.sharding import sharded_finish_prefill
from jaxkv.state.shared import deduplicate_shared
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32

LayerFunction = Callable[[Policy, Any, Array, State, Array, Array], tuple[Array, State]]


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder as three functions, so that prefill compiles once what is the same in all layers.

    embed: (weights, tokens [B,T] int32) -> x, an array.
    layer: (policy, weights of this layer, x, state, positions [B,T] uint32, valid [B,T] bool) ->
    (x, state); a tuple of functions where layers differ, one object for equal layers.
    head: (weights, x, indices [B,P] int32) -> float32 logits [B,P,V] of the next tokens after the
    tokens at those indices.
    layer_weights: (weights, number of the layer) -> weights of this layer; layers with one
    program (`Policy.program`) have equal shapes.
    policies: one per layer. spec: of all layers, or one per layer. vocab: V. identity: names the
    weights and their dtype, so that a prefix cache of another model never matches. mesh: the
    devices over which the KV heads are split.
    """

    embed: Callable[[Any, Array], Array]
    layer: LayerFunction | tuple[LayerFunction, ...]
    head: Callable[[Any, Array, Array], Array]
    layer_weights: Callable[[Any, int], Any]
    weights: Any
    policies: tuple[Policy, ...]
    spec: Spec | tuple[Spec, ...]
    vocab: int
    identity: str = ""
    mesh: Mesh | None = None

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The attention of each layer."""
        return self.spec if isinstance(self.spec, tuple) else (self.spec,) * len(self.policies)

    @cached_property
    def functions(self) -> tuple[LayerFunction, ...]:
        """`layer` of each layer."""
        return self.layer if isinstance(self.layer, tuple) else (self.layer,) * len(self.policies)

    def finish_prefill(self, number: int, policy: Policy, state: State) -> State:
        """`policy.finish_prefill` of one layer, on each device if there are several."""
        if self.mesh is None:
            return policy.finish_prefill(self.specs[number], state)
        return sharded_finish_prefill(self.mesh, policy, self.specs[number], state)

    @cached_property
    def programs(self) -> tuple[Policy, ...]:
        """The policy of each layer in its compiled programs, which layers share."""
        return tuple(policy.program for policy in self.policies)

    def layers(self, states: Sequence[State]) -> list[tuple[int, Policy, State]]:
        """The number, compiled policy and state of each layer."""
        pairs = zip(self.programs, states, strict=True)
        return [(number, policy, state) for number, (policy, state) in enumerate(pairs)]


def forward(
    model: Model,
    weights: Any,
    tokens: Int32[Array, "B T"],
    positions: UInt32[Array, "B T"],
    valid: Bool[Array, "B T"],
    states: Sequence[State],
    indices: Int32[Array, "B P"],
) -> tuple[Float32[Array, "B P V"], tuple[State, ...]]:
    """All layers in one program; returns the logits after the tokens at `indices`, and states."""
    # Equal layers are traced once.
    jitted = {function: jax.jit(function, static_argnums=0) for function in model.functions}
    x, new = model.embed(weights, tokens), []
    states = deduplicate_shared(model.programs, states)
    for number, policy, state in model.layers(states):
        layer = jitted[model.functions[number]]
        x, state = layer(policy, model.layer_weights(weights, number), x, state, positions, valid)
        new.append(state)
    return model.head(weights, x, indices), tuple(new)


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


def score(
    logits: Float32[Array, "M V"], token: Int32[Array, " M"], scored: Bool[Array, ""] | bool
) -> StepOutput:
    """The tokens with their log probabilities, which are computed only if `scored`."""

    def compute() -> tuple[Array, Array, Array]:
        logprobs = jax.nn.log_softmax(logits)
        best, top = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
        logprob = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
        return logprob, top.astype(jnp.int32), best

    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(compute))
    logprob, top, best = jax.lax.cond(scored, compute, lambda: nothing)
    return StepOutput(token, logprob, top, best, jnp.isfinite(jnp.max(logits, axis=1)))
