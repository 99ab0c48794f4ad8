"""The decoder of the Llama family in Flax nnx, every member from one Config.

Activations are feature-major, [D, B, T], and weights stand as published, (out, in): a product is
`W @ x`, whose output a CPU writes in long runs at any batch. Nothing is transposed at loading.
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
from jaxkv.models.config import Config
from jaxkv.state.sharding import sharded_step
from jaxkv.typing import Array, Bool, Float, Int32, UInt32

Weights = Mapping[str, Array]
_PARTS = 8  # of the product of one token with a weight of at least _LARGE elements, on a CPU
_LARGE = 2**18


def spec_of(config: Config, dtype: str) -> Spec:
    """How every layer of this model attends; dtype is that of cached keys and values."""
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
        for name, value in weights.items():
            setattr(self, name, nnx.Param(value))

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
        return self._bias(matmul(getattr(self, name)[...], x), name, axis=0)

    def _heads(self, x: Float[Array, "D B T"], name: str) -> Float[Array, "B T N H"]:
        if not _turned(x, tokens=x.shape[2]):
            y = self._linear(x, name)
            return y.reshape(-1, self.config.head_dim, *y.shape[1:]).transpose(2, 3, 0, 1)
        y = self._bias(dot(x, getattr(self, name)[...], (0, 1)), name, axis=2)
        return y.reshape(*y.shape[:2], -1, self.config.head_dim)

    def _from_heads(self, out: Float[Array, "B T N H"]) -> Float[Array, "D B T"]:
        rows, tokens = out.shape[:2]
        if not _turned(out, tokens):
            return self._linear(out.transpose(2, 3, 0, 1).reshape(-1, rows, tokens), "o")
        return self._bias(dot(self.o[...], out.reshape(rows, tokens, -1), (1, 2)), "o", axis=0)

    def _bias(self, y: Array, name: str, axis: int) -> Array:
        bias = getattr(self, f"{name}_bias", None)
        return y if bias is None else y + along(bias[...].astype(y.dtype), axis, y.ndim)


class Decoder(nnx.Module):
    """Tokens in, hidden states and new cache states out; `logits` reads the hidden states.

    run: what stands between the projections of a layer, of the signature of `jaxkv.step`, which it
    is by default, over the mesh where there is one.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        mesh: Mesh | None = None,
        run: Callable | None = None,
    ):
        self.config = config
        self.run = run or (step if mesh is None else partial(sharded_step, mesh))
        self.embed = nnx.Param(weights["embed"])
        self.norm = nnx.Param(weights["norm"])
        self.dtype = weights["layers.0.q"].dtype
        self.head = None if config.tied else nnx.Param(weights["head"])
        self.layers = nnx.data(
            [Layer(config, _layer_weights(weights, i)) for i in range(config.layers)]
        )

    def __call__(
        self,
        tokens: Int32[Array, "B T"],
        positions: UInt32[Array, "B T"],
        valid: Bool[Array, "B T"],
        policies: Sequence[Policy],
        states: Sequence[State],
    ) -> tuple[Float[Array, "D B T"], tuple[State, ...]]:
        # In training the embedding is wider than the other matrices.
        x = jnp.take(self.embed[...], tokens, axis=0).astype(self.dtype).transpose(2, 0, 1)
        new = []
        for layer, policy, state in zip(self.layers, policies, states, strict=True):
            x, state = layer(x, policy, state, positions, valid, self.run)
            new.append(state)
        return rms_norm(x, self.norm[...], self.config.norm_eps), tuple(new)

    def logits(self, hidden: Float[Array, "D B T"]) -> Float[Array, "V B T"]:
        """Float32 logits of the next token."""
        return matmul(self.unembedding().astype(hidden.dtype), hidden, jnp.float32)

    def unembedding(self) -> Float[Array, "V D"]:
        """The matrix that reads hidden states."""
        return (self.embed if self.head is None else self.head)[...]


def rms_norm(x: Array, weight: Array, eps: float, axis: int = 0) -> Array:
    """x over its root mean square along `axis`, times weight; the mean in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=axis, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean + np.float32(eps))).astype(x.dtype)
    return normed * along(weight.astype(x.dtype), axis, x.ndim)


def along(vector: Float[Array, " D"], axis: int, ndim: int) -> Array:
    """A vector that lies along one axis of an array of so many."""
    return vector.reshape([-1 if i == axis % ndim else 1 for i in range(ndim)])


def matmul(weight: Array, x: Array, dtype: jnp.dtype | None = None) -> Array:
    """weight [O,I] @ x [I,B,T], accumulated in float32."""
    whole = lambda weight, x: dot(weight, x, (1, 0), dtype)  # noqa: E731
    one = x.shape[1:] == (1, 1) and x.dtype == jnp.float32
    if not one or weight.size < _LARGE or weight.shape[0] % _PARTS:
        return whole(weight, x)
    in_parts = partial(_matmul_in_parts, dtype=dtype)
    return jax.lax.platform_dependent(weight, x, cpu=in_parts, default=whole)


def _matmul_in_parts(
    weight: Float[Array, "O I"], x: Float[Array, "I 1 1"], dtype: jnp.dtype | None
) -> Float[Array, "O 1 1"]:
    """One token's product: left to itself XLA:CPU cuts it so that some cores get less to read."""
    inputs = jnp.broadcast_to(x[:, 0, 0], (_PARTS, weight.shape[1]))
    y = jax.lax.dot_general(
        weight.reshape(_PARTS, -1, weight.shape[1]),
        inputs,
        (((2,), (1,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y.reshape(-1, 1, 1).astype(dtype or weight.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot(a: Array, b: Array, contract: tuple[int, int], dtype: jnp.dtype | None = None) -> Array:
    """The product over one axis of each, the first or the last, accumulated in float32.

    Gradients come out in the order of axes that their arrays have, so that nothing is turned; JAX's
    own rule turns activations, for which XLA:CPU takes longer than for the product itself.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    y = jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return y.astype(dtype or a.dtype)


def _dot_forward(
    a: Array, b: Array, contract: tuple[int, int], dtype: jnp.dtype | None
) -> tuple[Array, tuple[Array, Array]]:
    return dot(a, b, contract, dtype), (a, b)


def _dot_backward(
    contract: tuple[int, int], _: jnp.dtype | None, arrays: tuple[Array, Array], ct: Array
) -> tuple[Array, Array]:
    # As matrices: the axis that was summed over, and all others as one.
    a, b = (
        x.reshape(x.shape[0], -1) if axis == 0 else x.reshape(-1, x.shape[-1])
        for x, axis in zip(arrays, contract, strict=True)
    )
    ct = ct.astype(a.dtype).reshape(a.size // arrays[0].shape[contract[0]], -1)

    def gradient(of: int, other: Array, other_free: int) -> Array:
        first, second = (other, other_free), (ct, 1 - of)
        if contract[of] != 0:
            first, second = second, first
        found = dot(first[0], second[0], (first[1], second[1]))
        return found.reshape(arrays[of].shape)

    return gradient(0, b, int(contract[1] == 0)), gradient(1, a, int(contract[0] == 0))


dot.defvjp(_dot_forward, _dot_backward)


def _turned(x: Array, tokens: int) -> bool:
    """Whether a product comes out as heads want it, so that nobody has to turn it.

    In half precision jax 0.7 has no such product on a CPU.
    """
    return tokens > 1 and x.dtype == jnp.float32


def _layer_weights(weights: Weights, layer: int) -> dict[str, Array]:
    prefix = f"layers.{layer}."
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
