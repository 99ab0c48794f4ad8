"""The MLP of a layer, and the product with a weight that every projection is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.models.network import quantised
from jaxkv.models.network.config import Config
from jaxkv.models.network.quantised import Quantised
from jaxkv.platform import cpu as xla_cpu
from jaxkv.typing import Array, Float

# From tokens and the name of a matrix, gate, up or down, to their product and its bias.
Project = Callable[[Float[Array, "B T I"], str], Float[Array, "B T O"]]

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
SWISH = 1.702  # the factor in the sigmoid of a clamped MLP


def mlp(config: Config, project: Project, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The MLP that `config` describes; project: its matrices."""
    if not config.gated:
        return project(ACTIVATIONS[config.activation](project(x, "up")), "down")
    gate, up = project(x, "gate"), project(x, "up")
    if config.clamp is None:
        return project(ACTIVATIONS[config.activation](gate) * up, "down")
    gate, up = jnp.minimum(gate, config.clamp), jnp.clip(up, -config.clamp, config.clamp)
    return project(gate * jax.nn.sigmoid(gate * SWISH) * (up + 1), "down")


def linear(
    x: Float[Array, "B T I"],
    weight: Float[Array, "O I"] | Quantised,
    bias: Float[Array, " O"] | None = None,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "B T O"]:
    """x @ weight.T + bias, accumulated in float32; dtype: of the result, by default that of x."""
    product = quantised.linear if isinstance(weight, Quantised) else xla_cpu.linear
    y = product(x, weight, dtype or x.dtype)
    return y if bias is None else y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
