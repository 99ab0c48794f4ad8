"""The decoder, from whose Config every family follows; Llama has the default of every switch.

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
from jaxkv.models.network.config import Config, of_layer
from jaxkv.models.network.experts import mix
from jaxkv.models.network.mlp import linear, mlp
from jaxkv.models.network.quantised import Quantised
from jaxkv.state.sharding import sharded_step
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32

Weights = Mapping[str, Array | Quantised]
# A weight [tokens, D] that a published model lacks: the inputs of ids from the vocabulary on. No
# head predicts these ids.
SINK_TOKENS = "sink_tokens"


def spec_of(config: Config, dtype: str) -> Spec:
    """The attention of a layer of `of_layer`; dtype is that of cached keys and values."""
    return Spec(
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if config.scale is None else config.scale,
        encoding=config.encoding,
        softcap=config.softcap,
        dtype=dtype,
        group=config.heads // config.kv_heads,
    )


def specs_of(config: Config, dtype: str) -> tuple[Spec, ...]:
    """The attention of every layer."""
    return tuple(spec_of(of_layer(config, number), dtype) for number in range(config.layers))


def layer_weights(weights: Weights, number: int) -> dict[str, Array | Quantised]:
    """The weights of one layer, by their names within it."""
    prefix = f"layers.{number}."
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def layer(
    config: Config,
    weights: Weights,
    x: Float[Array, "B T D"],
    positions: UInt32[Array, "#B T"],
    attention: Callable[..., tuple[Float[Array, "B T N H"], Any]],
) -> tuple[Float[Array, "B T D"], Any]:
    """One block: attention and an MLP or experts, one after the other or in parallel.

    config: of a layer (`of_layer`). attention: called with the spec, q [B,T,N,H], k and v [B,T,K,H]
    before rotation, and the sink logits [N] or None. Returns the output, and the second result of
    `attention`.
    """

    def project(x: Array, name: str) -> Array:
        return linear(x, weights[name], weights.get(f"{name}_bias"))

    def norm(x: Array, name: str) -> Array:
        return normalized(config, x, weights[name], weights.get(f"{name}_bias"))

    def changed(x: Array) -> Array:
        return mix(config, weights, x) if config.experts else mlp(config, project, x)

    h = norm(x, "attn_norm") if config.norms_before else x
    q, k, v = (project(h, name) for name in ("q", "k", "v"))
    if config.qk_norm == "whole":
        q, k = norm(q, "q_norm"), norm(k, "k_norm")
    if config.clip_qkv is not None:
        q, k, v = (jnp.clip(a, -config.clip_qkv, config.clip_qkv) for a in (q, k, v))
    heads = (*h.shape[:2], -1, config.head_dim)
    q, k, v = (projected.reshape(heads) for projected in (q, k, v))
    if config.qk_norm == "head":
        q, k = norm(q, "q_norm"), norm(k, "k_norm")
    if config.query_growth is not None:
        base, length = config.query_growth
        growth = 1 + base * jnp.log1p((positions // np.uint32(length)).astype(jnp.float32))
        q = q * growth[:, :, None, None].astype(q.dtype)
    spec = spec_of(config, str(x.dtype))
    out, result = attention(spec, q, k, v, sink_logits(config, weights))
    attended = project(out.astype(x.dtype).reshape(*x.shape[:2], -1), "o")
    if config.norms_after:
        attended = norm(attended, "attn_post_norm")
    if config.parallel != "none":
        h = h if config.parallel == "shared" else norm(x, "mlp_norm")
        return x + attended + changed(h), result
    x = x + scaled(attended, config.residual_scale)
    change = changed(norm(x, "mlp_norm") if config.norms_before else x)
    if config.norms_after:
        change = norm(change, "mlp_post_norm")
    return x + scaled(change, config.residual_scale), result


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
    """One layer with its cache; config: of the layer.

    attention_fn: `jaxkv.step`, or a function with its signature.
    """

    def attention(spec: Spec, q: Array, k: Array, v: Array, sink_logits: Any) -> tuple:
        return attention_fn(policy, spec, state, q, k, v, positions, valid, sink_logits)

    return layer(config, weights, x, positions, attention)


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
            config = of_layer(self.config, number)
            x, state = _run_shared(
                config, policy, self.attention_fn, one_layer, x, state, positions, valid
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
        x = scaled(x, self.config.embedding_scale)
        if sinks is None:
            return x
        rows = jnp.take(sinks.astype(dtype), jnp.maximum(tokens - vocab, 0), axis=0, mode="clip")
        return jnp.where((tokens >= vocab)[..., None], rows, x)

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The hidden states, from the output of the last layer."""
        bias = self.parameters["norm_bias"][...] if self.config.norm_bias else None
        return normalized(self.config, x, self.parameters["norm"][...], bias)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float32[Array, "B T V"]:
        """Logits of the next token."""
        head = self.unembedding()
        if not isinstance(head, Quantised):
            head = head.astype(hidden.dtype)
        logits = scaled(linear(hidden, head, dtype=jnp.float32), self.config.logit_scale)
        softcap = self.config.logit_softcap
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)

    def unembedding(self) -> Float[Array, "V D"] | Quantised:
        """The output head, which is the embedding where the two are tied."""
        return self.weights["embed" if self.config.tied else "head"]


def normalized(
    config: Config,
    x: Float[Array, "... D"],
    weight: Float[Array, " D"],
    bias: Float[Array, " D"] | None = None,
) -> Float[Array, "... D"]:
    """x by the norm of this model; means in float32."""
    if config.norm == "rms":
        return rms_norm(x, weight, config.norm_eps)
    wide, eps = x.astype(jnp.float32), np.float32(config.norm_eps)
    if config.norm == "layer":
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    factor = weight.astype(jnp.float32) + (1.0 if config.norm == "rms_plus_one" else 0.0)
    normed *= jnp.broadcast_to(factor, x.shape)
    if bias is not None:
        normed += jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    return normed.astype(x.dtype)


def scaled(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """x times a factor, rounded to the dtype of x as published models round it."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Array:
    """x over its root mean square, times weight; the mean in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean + np.float32(eps))).astype(x.dtype)
    return normed * jnp.broadcast_to(weight.astype(x.dtype), x.shape)
