"""The decoder of the Llama family, every member from one Config.

`layer` is one block as a pure function of its weights. `Decoder` is the Flax nnx module over all
weights. Activations are [B, T, D]; weights keep their published layout, (out, in), so that loading
transposes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxkv.contract import Policy, Spec, State
from jaxkv.driver import step
from jaxkv.models.network import quantised
from jaxkv.models.network.config import Config
from jaxkv.models.network.quantised import Quantised
from jaxkv.platform import cpu as xla_cpu
from jaxkv.state.sharding import sharded_step
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

Weights = Mapping[str, Array | Quantised]
# A weight [tokens, D] that a published model lacks: the inputs of ids from the vocabulary on. No
# head predicts these ids.
SINK_TOKENS = "sink_tokens"


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


def layer_weights(weights: Weights, number: int) -> dict[str, Array | Quantised]:
    """The weights of one layer, by their names within it."""
    prefix = f"layers.{number}."
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def layer(
    config: Config,
    weights: Weights,
    x: Float[Array, "B T D"],
    attention: Callable[..., tuple[Float[Array, "B T N H"], Any]],
) -> tuple[Float[Array, "B T D"], Any]:
    """One block: attention, then a gated MLP.

    attention: called with the spec, q [B,T,N,H], k and v [B,T,K,H] before rotation, and the sink
    logits [N] or None. Returns the output, and the second result of `attention`.
    """

    def project(x: Array, name: str) -> Array:
        return linear(x, weights[name], weights.get(f"{name}_bias"))

    h = rms_norm(x, weights["attn_norm"], config.norm_eps)
    heads = (*h.shape[:2], -1, config.head_dim)
    q, k, v = (project(h, name).reshape(heads) for name in ("q", "k", "v"))
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.norm_eps)
        k = rms_norm(k, weights["k_norm"], config.norm_eps)
    spec = spec_of(config, str(x.dtype))
    out, result = attention(spec, q, k, v, sink_logits(config, weights))
    x = x + project(out.astype(x.dtype).reshape(*x.shape[:2], -1), "o")
    h = rms_norm(x, weights["mlp_norm"], config.norm_eps)
    return x + project(jax.nn.silu(project(h, "gate")) * project(h, "up"), "down"), result


def sink_logits(config: Config, weights: Weights) -> Float[Array | np.ndarray, " N"] | None:
    """The sink logits of a layer, one per query head; None for a model without them."""
    if config.sink_logit == "none":
        return None
    return weights["sink_logits"] if config.learned_sinks else np.zeros(config.heads, "f4")


def run_layer(
    config: Config,
    policy: Policy,
    attention_fn: Callable,
    weights: Weights,
    x: Float[Array, "B T D"],
    state: State,
    positions: UInt32[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T D"], State]:
    """One layer with its cache. attention_fn: `jaxkv.step`, or a function with its signature."""

    def attention(spec: Spec, q: Array, k: Array, v: Array, sink_logits: Any) -> tuple:
        return attention_fn(policy, spec, state, q, k, v, positions, valid, sink_logits)

    return layer(config, weights, x, attention)


# Within a program, equal layers are traced and lowered once.
_run_shared = jax.jit(run_layer, static_argnums=(0, 1, 2))


@cache  # one function per mesh, because each function is traced again
def step_on(mesh: Mesh | None) -> Callable:
    """`jaxkv.step`, sharded over a mesh if there is one."""
    return step if mesh is None else partial(sharded_step, mesh)


class Decoder(nnx.Module):
    """Maps tokens to hidden states and new cache states; `logits` maps hidden states to logits.

    mesh: attention is sharded over it. attention_fn: replaces `jaxkv.step`, the attention between
    the projections of a layer; a pure function, and one object for all calls, because equal layers
    are traced once for each object.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        mesh: Mesh | None = None,
        attention_fn: Callable | None = None,
    ):
        self.config = config
        self.attention_fn = attention_fn or step_on(mesh)
        self.parameters = nnx.data(
            {n: w if isinstance(w, Quantised) else nnx.Param(w) for n, w in weights.items()}
        )

    @property
    def weights(self) -> dict[str, Array | Quantised]:
        """All weights by name."""
        parameters = self.parameters.items()
        return {n: w if isinstance(w, Quantised) else w[...] for n, w in parameters}

    def __call__(
        self,
        tokens: Int32[Array, "B T"],
        positions: UInt32[Array, "B T"],
        valid: Bool[Array, "B T"],
        policies: Sequence[Policy],
        states: Sequence[State],
    ) -> tuple[Float[Array, "B T D"], tuple[State, ...]]:
        x, new, weights = self.embedded(tokens), [], self.weights
        for number, (policy, state) in enumerate(zip(policies, states, strict=True)):
            one_layer = layer_weights(weights, number)
            x, state = _run_shared(
                self.config, policy, self.attention_fn, one_layer, x, state, positions, valid
            )
            new.append(state)
        return self.normed(x), tuple(new)

    def embedded(self, tokens: Int32[Array, "B T"]) -> Float[Array, "B T D"]:
        """The input of the first layer."""
        weights, vocab = self.weights, self.config.vocab
        embed, sinks, first = weights["embed"], weights.get(SINK_TOKENS), weights["layers.0.q"]
        dtype = (weights["norm"] if isinstance(first, Quantised) else first).dtype
        vocabulary_ids = tokens if sinks is None else jnp.minimum(tokens, vocab - 1)
        if isinstance(embed, Quantised):
            x = quantised.rows(embed, vocabulary_ids, dtype)
        else:  # in training the embedding is wider than the other matrices
            x = jnp.take(embed, vocabulary_ids, axis=0).astype(dtype)
        if sinks is None:
            return x
        rows = jnp.take(sinks.astype(dtype), jnp.maximum(tokens - vocab, 0), axis=0, mode="clip")
        return jnp.where((tokens >= vocab)[..., None], rows, x)

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The hidden states, from the output of the last layer."""
        return rms_norm(x, self.parameters["norm"][...], self.config.norm_eps)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float32[Array, "B T V"]:
        """Logits of the next token."""
        head = self.unembedding()
        if not isinstance(head, Quantised):
            head = head.astype(hidden.dtype)
        return linear(hidden, head, dtype=jnp.float32)

    def unembedding(self) -> Float[Array, "V D"] | Quantised:
        """The output head, which is the embedding where the two are tied."""
        return self.weights["embed" if self.config.tied else "head"]


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Array:
    """x over its root mean square, times weight; the mean in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean + np.float32(eps))).astype(x.dtype)
    return normed * jnp.broadcast_to(weight.astype(x.dtype), x.shape)


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
