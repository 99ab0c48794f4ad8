"""The decoder of the Llama family in Flax nnx, every member from one Config.

Activations are feature-major, [D, B, T], and weights keep their published layout, (out, in). A
product is `W @ x`, whose output a CPU writes contiguously at any batch size. Loading transposes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxkv.contract import Policy, Spec, State
from jaxkv.driver import step
from jaxkv.models.network import quantised, xla_cpu
from jaxkv.models.network.config import Config
from jaxkv.models.network.quantised import Quantised
from jaxkv.models.network.xla_cpu import dot, has_head_last_product
from jaxkv.state.sharding import sharded_step
from jaxkv.typing import Array, Bool, Float, Int32, UInt32

Weights = Mapping[str, Array | Quantised]
# A weight [tokens, D] that a published model lacks: the inputs of ids from the vocabulary on. No
# head predicts these ids.
SINK_TOKENS = "sink_tokens"
# Weights [L, K, P, H] that a published model lacks: the P first cached keys, before rotation, and
# values of every stream, which stand for no token.


def spec_of(config: Config, dtype: str) -> Spec:
    """The attention of every layer of this model; dtype is that of cached keys and values."""
    return Spec(
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        encoding=config.encoding,
        dtype=dtype,
        group=config.heads // config.kv_heads,
    )


class Layer(nnx.Module):
    """One block: attention through a cache policy, then a gated MLP."""

    def __init__(self, config: Config, weights: Weights):
        self.config = config
        self.names = tuple(weights)
        for name, value in weights.items():
            setattr(self, name, _parameter(value))

    @property
    def weights(self) -> dict[str, Array | Quantised]:
        """The weights of this layer, by name."""
        return {name: _value(getattr(self, name)) for name in self.names}

    def __call__(
        self,
        x: Float[Array, "D B T"],
        policy: Policy,
        state: State,
        positions: UInt32[Array, "B T"],
        valid: Bool[Array, "B T"],
        run: Callable,
    ) -> tuple[Float[Array, "D B T"], State]:
        c = self.config
        h = rms_norm(x, self.attn_norm[...], c.norm_eps)
        q, k, v = (self._heads(h, name) for name in ("q", "k", "v"))
        if c.qk_norm:
            q = rms_norm(q, self.q_norm[...], c.norm_eps, axis=-1)
            k = rms_norm(k, self.k_norm[...], c.norm_eps, axis=-1)
        spec = spec_of(c, str(x.dtype))
        out, state = run(policy, spec, state, q, k, v, positions, valid, self._sink())
        x = x + self._from_heads(out.astype(x.dtype))
        h = rms_norm(x, self.mlp_norm[...], c.norm_eps)
        gate, up = self._linear(h, "gate"), self._linear(h, "up")
        return x + self._linear(jax.nn.silu(gate) * up, "down"), state

    def _sink(self) -> Float[Array, " N"] | None:
        if self.config.sink_logit == "none":
            return None
        return self.sinks[...] if self.config.learned_sinks else np.zeros(self.config.heads, "f4")

    def _linear(self, x: Float[Array, "I B T"], name: str) -> Float[Array, "O B T"]:
        return self._bias(matmul(_value(getattr(self, name)), x), name, axis=0)

    def _heads(self, x: Float[Array, "D B T"], name: str) -> Float[Array, "B T N H"]:
        if not has_head_last_product(x, tokens=x.shape[2]):
            y = self._linear(x, name)
            return y.reshape(-1, self.config.head_dim, *y.shape[1:]).transpose(2, 3, 0, 1)
        y = self._bias(product(x, _value(getattr(self, name)), (0, 1), axis=2), name, axis=2)
        return y.reshape(*y.shape[:2], -1, self.config.head_dim)

    def _from_heads(self, out: Float[Array, "B T N H"]) -> Float[Array, "D B T"]:
        batch, tokens = out.shape[:2]
        if not has_head_last_product(out, tokens):
            return self._linear(out.transpose(2, 3, 0, 1).reshape(-1, batch, tokens), "o")
        y = product(_value(self.o), out.reshape(batch, tokens, -1), (1, 2), axis=0)
        return self._bias(y, "o", axis=0)

    def _bias(self, y: Array, name: str, axis: int) -> Array:
        bias = getattr(self, f"{name}_bias", None)
        return y if bias is None else y + along(bias[...].astype(y.dtype), axis, y.ndim)


def run_layer(
    config: Config,
    policy: Policy,
    mesh: Mesh | None,
    weights: Weights,
    x: Float[Array, "D B T"],
    state: State,
    positions: UInt32[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> tuple[Float[Array, "D B T"], State]:
    """One layer with its cache."""
    run = step if mesh is None else partial(sharded_step, mesh)
    return Layer(config, weights)(x, policy, state, positions, valid, run)


def _run_other(
    config: Config, policy: object, run: Callable, weights: Weights, *arrays: object
) -> tuple[Float[Array, "D B T"], object]:
    """One layer with `run` in place of `jaxkv.step`."""
    return Layer(config, weights)(arrays[0], policy, *arrays[1:], run)


# Within a program, equal layers are traced and lowered once.
_run_shared = jax.jit(run_layer, static_argnums=(0, 1, 2))
_run_other_shared = jax.jit(_run_other, static_argnums=(0, 1, 2))
# The backward pass has only the input of each layer, and computes the rest again.
_run_other_again = jax.checkpoint(_run_other_shared, static_argnums=(0, 1, 2))


class Decoder(nnx.Module):
    """Maps tokens to hidden states and new cache states; `logits` maps hidden states to logits.

    mesh: attention is sharded over it. run: replaces `jaxkv.step`, the attention between the
    projections of a layer; a pure function, and one object for all calls, because equal layers are
    traced once for each object. remat: with `run`, the backward pass computes a layer again.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        mesh: Mesh | None = None,
        run: Callable | None = None,
        remat: bool = False,
    ):
        self.config, self.mesh, self.run, self.remat = config, mesh, run, remat
        self.embed = _parameter(weights["embed"])
        self.norm = nnx.Param(weights["norm"])
        self.sink_tokens = nnx.Param(weights[SINK_TOKENS]) if SINK_TOKENS in weights else None
        first = weights["layers.0.q"]
        self.dtype = (weights["norm"] if isinstance(first, Quantised) else first).dtype
        self.head = None if config.tied else _parameter(weights["head"])
        self.layers = nnx.data(
            [Layer(config, layer_weights(weights, i)) for i in range(config.layers)]
        )

    def __call__(
        self,
        tokens: Int32[Array, "B T"],
        positions: UInt32[Array, "B T"],
        valid: Bool[Array, "B T"],
        policies: Sequence[Policy],
        states: Sequence[State],
    ) -> tuple[Float[Array, "D B T"], tuple[State, ...]]:
        x, new = self.embedded(tokens), []
        for layer, policy, state in zip(self.layers, policies, states, strict=True):
            arrays = layer.weights, x, state, positions, valid
            if self.run is None:
                x, state = _run_shared(self.config, policy, self.mesh, *arrays)
            else:
                run_other = _run_other_again if self.remat else _run_other_shared
                x, state = run_other(self.config, policy, self.run, *arrays)
            new.append(state)
        return self.normed(x), tuple(new)

    def embedded(self, tokens: Int32[Array, "B T"]) -> Float[Array, "D B T"]:
        """The input of the first layer."""
        embed, vocab = _value(self.embed), self.config.vocab
        vocabulary_ids = tokens if self.sink_tokens is None else jnp.minimum(tokens, vocab - 1)
        if isinstance(embed, Quantised):
            x = quantised.rows(embed, vocabulary_ids, self.dtype)
        else:  # in training the embedding is wider than the other matrices
            x = jnp.take(embed, vocabulary_ids, axis=0).astype(self.dtype)
        if self.sink_tokens is not None:
            sinks = self.sink_tokens[...].astype(self.dtype)
            sinks = jnp.take(sinks, jnp.maximum(tokens - vocab, 0), axis=0, mode="clip")
            x = jnp.where((tokens >= vocab)[..., None], sinks, x)
        return x.transpose(2, 0, 1)

    def normed(self, x: Float[Array, "D B T"]) -> Float[Array, "D B T"]:
        """The hidden states, from the output of the last layer."""
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def logits(self, hidden: Float[Array, "D B T"]) -> Float[Array, "V B T"]:
        """Float32 logits of the next token."""
        weight = self.unembedding()
        if not isinstance(weight, Quantised):
            weight = weight.astype(hidden.dtype)
        return matmul(weight, hidden, jnp.float32)

    def unembedding(self) -> Float[Array, "V D"] | Quantised:
        """The output head, which is the embedding where the two are tied."""
        return _value(self.embed if self.head is None else self.head)


def rms_norm(x: Array, weight: Array, eps: float, axis: int = 0) -> Array:
    """x over its root mean square along `axis`, times weight; the mean in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=axis, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean + np.float32(eps))).astype(x.dtype)
    return normed * along(weight.astype(x.dtype), axis, x.ndim)


def along(vector: Float[Array, " D"], axis: int, ndim: int) -> Array:
    """Reshape a vector to broadcast along one axis of an array with `ndim` axes."""
    return vector.reshape([-1 if i == axis % ndim else 1 for i in range(ndim)])


def matmul(weight: Array | Quantised, x: Array, dtype: jnp.dtype | None = None) -> Array:
    """weight [O,I] @ x [I,B,T], accumulated in float32."""
    if isinstance(weight, Quantised):
        return quantised.matmul(weight, x).astype(dtype or x.dtype)
    return xla_cpu.matmul(weight, x, dtype, lambda weight, x: dot(weight, x, (1, 0), dtype))


def product(
    a: Array | Quantised, b: Array | Quantised, contract: tuple[int, int], axis: int
) -> Array:
    """`dot(a, b, contract)`, of which one may be quantised; axis: its output channels."""
    if isinstance(a, Quantised):
        multiply = lambda a: dot(a, b, contract, jnp.float32)  # noqa: E731
        return quantised.product(a, b, multiply, axis).astype(b.dtype)
    if isinstance(b, Quantised):
        multiply = lambda b: dot(a, b, contract, jnp.float32)  # noqa: E731
        return quantised.product(b, a, multiply, axis).astype(a.dtype)
    return dot(a, b, contract)


def _parameter(weight: Array | Quantised) -> object:
    return nnx.data(weight) if isinstance(weight, Quantised) else nnx.Param(weight)


def _value(weight: object) -> Array | Quantised:
    return weight if isinstance(weight, Quantised) else weight[...]


def layer_weights(weights: Weights, layer: int) -> dict[str, Array]:
    """The weights of one layer, by their names within it."""
    prefix = f"layers.{layer}."
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
