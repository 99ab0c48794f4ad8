"""Causal attention within whole samples, without a cache: for training and for its analysis.

`attend` and `attend_with_probabilities` attend within the layer's own window (`config.windows`).
Samples begin at position 0 and have no padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxkv.attention import batched_dot, blend, merge, scores, sink_logit
from jaxkv.contract import Partial, Spec
from jaxkv.errors import UserError
from jaxkv.models.network.config import Config, of_layer
from jaxkv.models.network.decoder import Decoder, Weights, layer, layer_weights
from jaxkv.models.network.device import cuda_capability
from jaxkv.platform import cpu as xla_cpu
from jaxkv.rotary import Alibi
from jaxkv.typing import Array, Bool, Float, Float32, Int32

SINK_HEAD = 0.3  # mean attention on the first token above which a head counts as a sink head
_HALF = ("bfloat16", "float16")
_SINK_DIMS = 8  # extra head dims for a sink logit in a fused kernel, which needs a multiple of 8
_SINK_TERMS = 3  # dims used: three bfloat16 terms add up to a float32

UncachedImplementation = Literal["xla", "cudnn"]


def forward(
    config: Config,
    weights: Weights,
    inputs: Int32[Array, "B T"],
    attention_fn: Callable | None = None,
    remat: bool = False,
) -> tuple[Decoder, Float[Array, "B T D"], tuple]:
    """Run the decoder over whole samples. Returns it, the hidden states, and per-layer results.

    attention_fn: `attend` (the default) or `attend_with_probabilities`, whose second result is
    returned for each layer; one object for all calls, because equal layers are traced once for each
    object. remat: the backward pass keeps only the input of each layer.
    """
    decoder = Decoder(config, weights)
    x, results = decoder.embedded(inputs), []
    run = _layer_remat if remat else _layer_shared
    for number, window in enumerate(config.windows):
        x, result = run(
            of_layer(config, number),
            window,
            attention_fn or attend,
            layer_weights(weights, number),
            x,
        )
        results.append(result)
    return decoder, decoder.normed(x), tuple(results)


def run_layer(
    config: Config,
    window: int | None,
    attention_fn: Callable,
    weights: Weights,
    x: Float[Array, "B T D"],
) -> tuple[Float[Array, "B T D"], Any]:
    """One layer without a cache, and the second result of its attention."""
    positions = jnp.arange(x.shape[1], dtype=jnp.uint32)[None]
    return layer(config, weights, x, positions, partial(attention_fn, window))


_layer_shared = jax.jit(run_layer, static_argnums=(0, 1, 2))
# The backward pass has only the input of each layer, and computes the rest again.
_layer_remat = jax.checkpoint(_layer_shared, static_argnums=(0, 1, 2))


def attend(
    window: int | None,
    spec: Spec,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    sink_logits: Float[Array, " N"] | None = None,
    implementation: UncachedImplementation | None = None,
) -> tuple[Float[Array, "B T N H"], None]:
    """Causal attention of each sample to itself, within the window; there is no second result.

    implementation: `cudnn` is cuDNN's flash attention on an NVIDIA GPU in half precision, `xla`
    runs anywhere; None takes cuDNN where it is available.
    Raises UserError for `cudnn` where it cannot run, and for ALiBi.
    """
    if isinstance(spec.encoding, Alibi):
        raise UserError("attention without a cache has no ALiBi; use a cache, or another model")
    lacks = cudnn_lacks(jax.local_devices()[0], q, spec.softcap, window, sink_logits)
    if implementation is None:
        implementation = "xla" if lacks else "cudnn"
    at = jnp.arange(q.shape[1], dtype=jnp.uint32)[None]
    q, k = spec.encoding.rotate(q, at), spec.encoding.rotate(k, at)
    if implementation == "cudnn":
        if lacks:
            raise UserError(f"cudnn attends {lacks}; use implementation='xla'")
        return fused_attention(q, k, v, spec.scale, window, sink_logits, "cudnn"), None
    out, lse = _attend_in_blocks(q, k, v, spec, window)
    if sink_logits is not None:  # equals `merge` with a sink logit
        out = out * jax.nn.sigmoid(lse - sink_logits.astype(jnp.float32)[None, None])[..., None]
    return out, None


def cudnn_lacks(
    device: jax.Device,
    q: Float[Array, "B T N H"],
    softcap: float | None = None,
    window: int | None = None,
    sink_logits: object = None,
) -> str:
    """Why cuDNN's flash attention cannot run, to complete a message; empty where it can."""
    capability = cuda_capability(device)
    if capability is None:
        return f"on an NVIDIA GPU, got {device.platform}"
    if capability < 8:
        return f"from compute capability 8.0 on, got {capability}"
    if q.dtype.name not in _HALF:
        return f"in bfloat16 or float16, got {q.dtype}"
    if softcap is not None or (sink_logits is not None and window is not None):
        return "without a softcap, and without a window where there is a sink logit"
    head_dim, max_dim = q.shape[-1] + (_SINK_DIMS if is_learned(sink_logits) else 0), 128
    if head_dim % 8 or head_dim > (max_dim if capability < 9 else 2 * max_dim):
        return (
            f"with a head dim of eights, up to {max_dim} (256 from capability 9.0), got {head_dim}"
        )
    return ""


def is_learned(sink_logits: object) -> bool:
    """Whether sink logits may be nonzero; only a numpy array of zeros is known not to be."""
    zeros = isinstance(sink_logits, np.ndarray) and not sink_logits.any()
    return sink_logits is not None and not zeros


@cache  # one function per mesh, because each function is traced again
def attend_on(mesh: Mesh) -> Callable:
    """`attend` with samples split over the mesh axis `data`."""

    def attend_split(
        window: int | None, spec: Spec, q: Array, k: Array, v: Array, sink_logits: Array | None
    ) -> tuple[Array, None]:
        learned = (sink_logits,) if is_learned(sink_logits) else ()

        def attend_shard(q: Array, k: Array, v: Array, *logits: Array) -> Array:
            return attend(window, spec, q, k, v, logits[0] if logits else sink_logits)[0]

        split = jax.shard_map(
            attend_shard,
            mesh=mesh,
            in_specs=(PartitionSpec("data"),) * 3 + (PartitionSpec(),) * len(learned),
            out_specs=PartitionSpec("data"),
            check_vma=False,
        )
        return split(q, k, v, *learned), None

    return attend_split


def _attend_in_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    spec: Spec,
    window: int | None,
) -> Partial:
    """Causal attention of rotated q and k, one block of queries at a time."""
    batch, tokens, heads, head_dim = q.shape
    q = q.reshape(batch, tokens, spec.kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    k, v = (a.transpose(0, 2, 1, 3) for a in (k, v))
    out, lse = _blocks(q, k, v, spec.scale, spec.softcap, window)
    return Partial(
        out.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, head_dim),
        lse.transpose(0, 3, 1, 2).reshape(batch, tokens, heads),
    )


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _blocks(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Float32[Array, "B K G T H"], Float32[Array, "B K G T"]]:
    """Attention and its log-sum-exp; the backward pass recomputes the logits.

    As FlashAttention does (Dao 2023, algorithm 2). The axis order of every product avoids the
    transpose of a matrix of logits.
    """

    def attend_sample(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        parts = []
        for start, end, first in _spans(q.shape[2], window):
            logits, _ = _logits(q, k, start, end, first, scale, softcap, window)
            top = jnp.max(logits, axis=-1, keepdims=True)  # every query sees its own token
            weights = jnp.exp(logits - top)
            total = jnp.sum(weights, axis=-1, keepdims=True)
            out = batched_dot(weights.astype(v.dtype), v[:, first:end], (2, 1)) / total
            part = (out, (top + jnp.log(total))[..., 0])
            parts.append([leaf.reshape(*q.shape[:2], end - start, -1) for leaf in part])
        out, lse = (jnp.concatenate(leaves, axis=2) for leaves in zip(*parts, strict=True))
        return out, lse[..., 0]

    return xla_cpu.map_samples(attend_sample, q, k, v)


def _blocks_forward(
    q: Array, k: Array, v: Array, scale: float, softcap: float | None, window: int | None
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    out, lse = _blocks(q, k, v, scale, softcap, window)
    return (out, lse), (q, k, v, out, lse)


def _blocks_backward(
    scale: float,
    softcap: float | None,
    window: int | None,
    saved: tuple[Array, ...],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array, Array]:
    q, k, v, out, lse = saved
    d_out, d_lse = cotangents
    delta = jnp.sum(d_out * out, axis=-1) - d_lse
    d_out = d_out.astype(v.dtype)

    def sample_gradients(
        q: Array, k: Array, v: Array, d_out: Array, lse: Array, delta: Array
    ) -> tuple[Array, Array, Array]:
        d_q, d_k, d_v = [], 0, 0
        for start, end, first in _spans(q.shape[2], window):
            queries, d_here = (_cut(a, start, end) for a in (q, d_out))
            of_lse, of_delta = (_cut(a[..., None], start, end) for a in (lse, delta))
            logits, slope = _logits(q, k, start, end, first, scale, softcap, window)
            weights = jnp.exp(logits - of_lse)
            d_logits = weights * (batched_dot(d_here, v[:, first:end], (2, 2)) - of_delta) * slope
            weights, d_logits = weights.astype(v.dtype), d_logits.astype(v.dtype)
            d_here_q = batched_dot(d_logits, k[:, first:end], (2, 1))
            d_q.append(d_here_q.reshape(*q.shape[:2], end - start, -1))
            around = ((0, 0), (0, 0), (first, q.shape[2] - end))
            d_k = d_k + jnp.pad(batched_dot(queries, d_logits, (1, 1)), around)  # [K,H,T]
            d_v = d_v + jnp.pad(batched_dot(d_here, weights, (1, 1)), around)
        d_q = jnp.concatenate(d_q, axis=2)
        return d_q.astype(q.dtype), *(d.transpose(0, 2, 1).astype(v.dtype) for d in (d_k, d_v))

    return xla_cpu.map_samples(sample_gradients, q, k, v, d_out, lse, delta)


_blocks.defvjp(_blocks_forward, _blocks_backward)


def _spans(tokens: int, window: int | None) -> list[tuple[int, int, int]]:
    """Per block: its first query, the query after its last, and the first key that it sees."""
    spans = itertools.pairwise(xla_cpu.query_block_edges(tokens))
    return [(a, b, 0 if window is None else max(0, a + 1 - window)) for a, b in spans]


def _cut(a: Float[Array, "K G T X"], start: int, end: int) -> Float[Array, "K GT X"]:
    return a[:, :, start:end].reshape(a.shape[0], -1, a.shape[-1])


def _logits(
    q: Float[Array, "K G T H"],
    k: Float[Array, "K T H"],
    start: int,
    end: int,
    first: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Float32[Array, "K GT S"], Array | np.float32]:
    """Logits of a block of queries, -inf where a key is masked, and d logits / d (q.k)."""
    logits = batched_dot(_cut(q, start, end), k[:, first:end], (2, 2)) * np.float32(scale)
    slope = np.float32(scale)
    if softcap is not None:
        squashed = jnp.tanh(logits / np.float32(softcap))
        logits, slope = np.float32(softcap) * squashed, slope * (1 - squashed * squashed)
    visible = _visible(start, end, first, window, group=q.shape[1])
    return jnp.where(visible, logits, -jnp.inf), slope


def fused_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    scale: float,
    window: int | None = None,
    sink_logits: Float[Array, " N"] | None = None,
    implementation: UncachedImplementation = "cudnn",
) -> Float[Array, "B T N H"]:
    """Causal attention by one fused kernel, sinks included; q and k are rotated already.

    A sink is one more key before the sample, whose value is 0. A zero key makes it a zero sink. For
    a learned logit per query head, queries and keys get extra dims whose product is that logit: the
    extra dims are 1 in the sink's key and 0 in all others.
    """
    before = None if window is None else (window - 1, 0)
    attention = jax.nn.dot_product_attention
    if sink_logits is None:
        return attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=True,
            local_window_size=before,
            implementation=implementation,
        )
    tokens, head_dim = q.shape[1], q.shape[-1]
    padding = -(tokens + 1) % 8  # some kernels want even lengths; the causal mask hides it
    q, k, v = (jnp.pad(a, ((0, 0), (1, padding), (0, 0), (0, 0))) for a in (q, k, v))
    if is_learned(sink_logits):
        logits = jnp.broadcast_to(sink_logits.astype(jnp.float32) / np.float32(scale), q.shape[:3])
        terms = _split(logits, q.dtype)
        marks = np.zeros((1, k.shape[1], 1, _SINK_DIMS), np.float32)
        marks[:, 0, :, :_SINK_TERMS] = 1
        q = jnp.concatenate([q, terms], axis=-1)
        marks = jnp.broadcast_to(marks, (*k.shape[:3], _SINK_DIMS)).astype(k.dtype)
        k = jnp.concatenate([k, marks], axis=-1)
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, _SINK_DIMS)))
    out = attention(q, k, v, scale=scale, is_causal=True, implementation=implementation)
    return out[:, 1 : 1 + tokens, :, :head_dim]


def _split(value: Float32[Array, "..."], dtype: jnp.dtype) -> Float[Array, "... 8"]:
    """Split `value` into low-precision terms that add up to it, padded with zeros."""
    terms, rest = [], value
    for _ in range(_SINK_TERMS):
        terms.append(rest.astype(dtype))
        rest = rest - terms[-1].astype(jnp.float32)
    zeros = [jnp.zeros_like(terms[0])] * (_SINK_DIMS - _SINK_TERMS)
    return jnp.stack(terms + zeros, axis=-1)


def attend_with_probabilities(
    window: int | None,
    spec: Spec,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    sink_logits: Float[Array, " N"] | None = None,
) -> tuple[Float32[Array, "B T N H"], Float32[Array, "B N T T"]]:
    """As `attend`; the second result is the attention of every query to every key.

    With a sink logit the probabilities of a query add up to less than 1.
    """
    tokens = q.shape[1]
    at = jnp.arange(tokens, dtype=jnp.uint32)[None]
    q, k = spec.encoding.rotate(q, at), spec.encoding.rotate(k, at).transpose(0, 2, 1, 3)
    visible = _visible(0, tokens, 0, window)[None, None]
    logits = scores(q, k, spec.scale, spec.softcap)  # [B,K,G,T,S]
    if (bias := spec.encoding.bias(at, at, spec.kv_heads)) is not None:
        logits = logits + jnp.broadcast_to(bias, logits.shape)
    logits = jnp.where(visible, logits, -jnp.inf)
    attention = blend(logits, v.transpose(0, 2, 1, 3))
    if sink_logits is not None:
        attention = merge(attention, sink_logit(sink_logits, attention))
    logits = logits.reshape(logits.shape[0], -1, tokens, tokens)
    probabilities = jnp.exp(logits - attention.lse.transpose(0, 2, 1)[..., None])
    return attention.out, probabilities


def _visible(
    start: int, end: int, first: int, window: int | None, group: int = 1
) -> Bool[Array, "1 GT S"]:
    """Mask of the keys first .. end-1 that the queries start .. end-1 attend to."""
    queries = np.tile(np.arange(start, end, dtype=np.int32), group)
    back = jnp.asarray(queries)[:, None] - jnp.arange(first, end)[None, :]
    visible = back >= 0
    return (visible if window is None else visible & (back < window))[None]


@partial(jax.jit, static_argnums=(0, 3))
def mass_on_first(
    config: Config, weights: Weights, ids: Int32[Array, "B T"], skip: int
) -> Float32[Array, "L N"]:
    """Attention of each head to the first token, averaged over the queries from `skip` on."""
    _, _, layers = forward(config, weights, ids, attend_with_probabilities)
    return jnp.stack([jnp.mean(layer[:, :, skip:, 0], axis=(0, 2)) for layer in layers])
