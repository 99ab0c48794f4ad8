"""Geometry of the keys, queries and values of a layer (MagicPIG, Figures 2, 4, 9 to 11).

Keys are rotated to their positions; the first key of a stretch is the sink.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Spec
from jaxkv.evals.magicpig.heads import (
    CapturedLayer,
    attend,
    errors,
    exact_attention,
    interval,
    last_queries,
    rotate_queries_and_keys,
)
from jaxkv.policies import TopK
from jaxkv.policies.sparse_attention import base as sparse_attention

FIFTH = 0.2  # of the keys, in Figures 2 and 4


def geometry(spec: Spec, layer: CapturedLayer, title: str) -> dict[str, Any]:
    """Measures of one layer: means over its KV heads, of cosines also the minimum."""
    q, k = (np.asarray(a, np.float64) for a in rotate_queries_and_keys(spec, layer))
    sink, mean = k[:, :, 0], k.mean(axis=2)  # [B,K,H]
    last = q[:, -1].reshape(*sink.shape[:2], -1, q.shape[-1])  # [B,K,G,H]
    return {
        "sink key with mean key": _summary(_cosine(sink, mean)),
        "sink keys of two stretches": _summary(_across(sink)),
        "mean keys of two stretches": _summary(_across(mean)),
        "query with sink key": _summary(_cosine(last, sink[:, :, None])),
        "query with mean key": _summary(_cosine(last, mean[:, :, None])),
        "value of the sink over others": _value_norms(layer),
        "deviations": _deviations(spec, layer, title),
    }


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(axis=-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def _across(x: np.ndarray) -> np.ndarray:
    """Cosines of every two stretches in [B,K,H]."""
    first, second = np.triu_indices(len(x), 1)
    return _cosine(x[first], x[second])


def _summary(values: np.ndarray) -> dict[str, float]:
    return {"mean": values.mean(), "min": values.min(), "max": values.max()}


def _value_norms(layer: CapturedLayer) -> dict[str, float]:
    norms = np.linalg.norm(np.asarray(layer.v, np.float64), axis=-1)  # [B,T,K]
    return _summary(norms[:, 0] / norms[:, 1:].mean(axis=1))


def _deviations(spec: Spec, layer: CapturedLayer, title: str) -> dict[str, float]:
    """Standard deviations over the keys of one query, averaged over queries: of log|v - o| and of
    the logits. The optimal sampling probability is proportional to the exponential of their sum."""
    scores = last_queries(spec, layer, 0, 0)
    rows, kv_heads, group, queries, _ = scores.logits.shape
    out = np.asarray(exact_attention(spec, layer, title), np.float64)
    out = out.reshape(rows, queries, kv_heads, group, -1)
    v = np.asarray(layer.v, np.float64)
    # |v - o|^2 expanded, because the differences need H times the memory.
    product = np.einsum("btkh,bqkgh->bkgqt", v, out, optimize=True)
    norms = (v**2).sum(axis=-1).transpose(0, 2, 1)[:, :, None, None]
    output_norms = (out**2).sum(axis=-1).transpose(0, 2, 3, 1)[..., None]
    distance = 0.5 * np.log(np.maximum(norms - 2 * product + output_norms, 1e-12))
    seen = np.broadcast_to(np.asarray(scores.selectable), distance.shape)
    return {
        name: float(np.std(x, axis=-1, where=seen).mean())
        for name, x in (("log |v - o|", distance), ("logits", np.asarray(scores.logits)))
    }


def long_tail(spec: Spec, layer: CapturedLayer, title: str) -> dict[str, Any]:
    """The weight of the heaviest fifth of the keys, with and without the ends, and the error of
    attention to that fifth alone."""
    tails = {}
    for name, chosen in (("all", TopK(FIFTH, sinks=0, window=1)), ("between", TopK(FIFTH))):
        weight, out = _top(chosen, spec, layer)
        tails[name] = {
            "weight": interval(np.asarray(weight, np.float64)),
            "error": interval(errors(out, exact_attention(spec, layer, title))),
        }
    return tails


@partial(jax.jit, static_argnums=(0, 1))
def _top(chosen: TopK, spec: Spec, layer: CapturedLayer) -> tuple[jax.Array, jax.Array]:
    """The share [B] of the softmax over the keys between the ends that the selected keys have."""
    scores = last_queries(spec, layer, chosen.sinks, chosen.window)
    bias = chosen.select(scores)
    top = sparse_attention.log_sum(scores.logits, scores.selectable & (bias == 0))
    weight = jnp.exp(top - sparse_attention.log_sum(scores.logits, scores.selectable))
    return jnp.mean(weight, axis=(1, 2, 3, 4)), attend(scores, bias, layer.v).out
