"""How far the predictions under a cache policy are from those under full attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.typing import Array, Bool, Float32


def divergence(
    full: Float32[Array, "B T V"], policy_logits: Float32[Array, "B T V"]
) -> tuple[Float32[Array, "B T"], Bool[Array, "B T"]]:
    """KL(full || other) of the next token in nats, and whether the likeliest token is the same.

    full, policy_logits: logits under full attention and under a policy, of the same tokens.
    """
    p, q = jax.nn.log_softmax(full, axis=-1), jax.nn.log_softmax(policy_logits, axis=-1)
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    return kl, jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
