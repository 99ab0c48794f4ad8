"""A model that the engine can run, in the parts that the engine compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxkv.contract import Policy, Spec, State
from jaxkv.state.loop_carry import deduplicate_shared
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder as three functions, so that prefill compiles once what is the same in all layers.

    embed: (weights, tokens [B,T] int32) -> x, an array.
    layer: (policy, weights of this layer, x, state, positions [B,T] uint32, valid [B,T] bool) ->
    (x, state).
    head: (weights, x, indices [B,P] int32) -> float32 logits [B,P,V] of the next tokens after the
    tokens at those indices.
    layer_weights: (weights, number of the layer) -> weights of this layer; layers with one policy
    have equal shapes.
    policies: one per layer. vocab: V. identity: names the weights and their dtype, so that a prefix
    cache of another model never matches.
    """

    embed: Callable[[Any, Array], Array]
    layer: Callable[[Policy, Any, Array, State, Array, Array], tuple[Array, State]]
    head: Callable[[Any, Array, Array], Array]
    layer_weights: Callable[[Any, int], Any]
    weights: Any
    policies: tuple[Policy, ...]
    spec: Spec
    vocab: int
    identity: str = ""

    def layers(self, states: Sequence[State]) -> list[tuple[int, Policy, State]]:
        """The number, policy and state of each layer."""
        pairs = zip(self.policies, states, strict=True)
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
    layer = jax.jit(model.layer, static_argnums=0)  # traces equal layers once
    x, new = model.embed(weights, tokens), []
    states = deduplicate_shared(model.policies, states)
    for number, policy, state in model.layers(states):
        x, state = layer(policy, model.layer_weights(weights, number), x, state, positions, valid)
        new.append(state)
    return model.head(weights, x, indices), tuple(new)
