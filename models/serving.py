"""A model of this package as the engine runs it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkv.contract import Policy, State
from jaxkv.engine import Engine, Model, Prefixes
from jaxkv.errors import UserError
from jaxkv.models.decoder import Decoder, Weights
from jaxkv.models.llm import Llm
from jaxkv.models.streams import DEFAULT_POLICY
from jaxkv.models.text import warn_beyond_context
from jaxkv.typing import Array, Bool, Float32, Int32, UInt32


def model_of(llm: Llm, policy: str | Policy | Sequence[Policy | str] = DEFAULT_POLICY) -> Model:
    """The engine's view of a loaded model under a cache policy.

    Raises UserError for a model over a mesh.
    """
    if llm.mesh is not None:
        raise UserError("the engine runs on one device, got a model over a mesh; load it without")
    policies = llm.policies(policy)

    def forward(
        weights: Weights,
        tokens: Int32[Array, "B T"],
        positions: UInt32[Array, "B T"],
        valid: Bool[Array, "B T"],
        states: tuple[State, ...],
        places: Int32[Array, "B P"],
    ) -> tuple[Float32[Array, "B P V"], tuple[State, ...]]:
        decoder = Decoder(llm.config, weights, llm.mesh)
        hidden, states = decoder(tokens, positions, valid, policies, states)
        asked = jnp.take_along_axis(hidden, places[None], axis=2)
        # Unbarred, XLA folds the transpose into the product, and on a CPU fails on it in bfloat16.
        logits = jax.lax.optimization_barrier(decoder.logits(asked))
        return logits.transpose(1, 2, 0), states

    identity = f"{llm.folder.name} {llm.config} {llm.dtype}"
    return Model(forward, llm.weights, policies, llm.spec, llm.config.vocab, identity)


def engine_of(
    llm: Llm,
    policy: str | Policy | Sequence[Policy | str] = DEFAULT_POLICY,
    *,
    slots: int = 16,
    room: int = 4096,
    chunk: int = 128,
    queue: int = 256,
    queue_tokens: int = 2**20,
    prefixes: Prefixes | None = None,
    seed: int = 0,
) -> Engine:
    """An engine over a loaded model, compiled and ready; the arguments are those of `Engine`."""
    model = model_of(llm, policy)
    warn_beyond_context(llm, model.policies, room)
    return Engine(
        model, slots, room, chunk, queue=queue, queue_tokens=queue_tokens, prefixes=prefixes,
        seed=seed,
    )  # fmt: skip
