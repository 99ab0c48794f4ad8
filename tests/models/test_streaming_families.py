"""`streaming` on GPT-NeoX, MPT and Falcon equals plain numpy over the published tensors.

The numpy model attends, for each query, to the sinks and the window, whose positions are their
indices in the cache (StreamingLLM, section 3.2). Neither its code nor its weights come from jaxkv.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxkv.models.generation.streams import Stream
from tests.models.folders import FAMILIES, write_model
from tests.models.test_parity import LIMIT, prefill, untokenized

SINKS, WINDOW, TOKENS = 2, 14, 60  # three times the cache, and more
MODELS = {"neox": "gpt_neox.", "mpt": "transformer.", "falcon7b": "transformer."}


@pytest.mark.parametrize("chunk", [1, 5, 16, 29, 60])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_numpy(name, chunk, tmp_path):
    llm = untokenized(write_model(tmp_path, name))
    ids = np.random.default_rng(3).integers(0, 256, TOKENS).tolist()
    stream = Stream(llm, f"streaming:sinks={SINKS},window={WINDOW}")
    (actual,) = prefill(stream, [ids], (chunk,) * math.ceil(TOKENS / chunk))
    weights = {
        n: w.astype(np.float64) for n, w in load_file(tmp_path / "model.safetensors").items()
    }
    expected = numpy_logits(name, weights, FAMILIES[name], ids)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=LIMIT)


def numpy_logits(name, weights, fields, ids):
    """[T,V] in float64."""
    prefix = MODELS[name]
    inner = {n.removeprefix(prefix): w for n, w in weights.items()}
    embed = next(inner[n] for n in ("embed_in.weight", "wte.weight", "word_embeddings.weight")
                 if n in inner)  # fmt: skip
    blocks = {"neox": "layers", "mpt": "blocks", "falcon7b": "h"}[name]
    x = embed[ids]
    for i in range(3):
        block = {n.removeprefix(f"{blocks}.{i}."): w for n, w in inner.items()}
        x = {"neox": neox, "mpt": mpt, "falcon7b": falcon}[name](block, x, fields)
    final = {"neox": "final_layer_norm", "mpt": "norm_f", "falcon7b": "ln_f"}[name]
    return norm(inner, final, x) @ inner.get("embed_out.weight", embed).T


def neox(block, x, fields):
    heads = fields["num_attention_heads"]
    fused = dense(block, "attention.query_key_value", norm(block, "input_layernorm", x))
    q, k, v = fused.reshape(len(x), heads, 3, -1).transpose(2, 0, 1, 3)
    rotated = int(q.shape[-1] * fields.get("rotary_pct", 0.25))
    attended = dense(block, "attention.dense", attend(q, k, v, rotated=rotated))
    h = norm(block, "post_attention_layernorm", x)
    return (
        x + attended + dense(block, "mlp.dense_4h_to_h", gelu(dense(block, "mlp.dense_h_to_4h", h)))
    )


def mpt(block, x, fields):
    heads = fields["n_heads"]
    fused = dense(block, "attn.Wqkv", norm(block, "norm_1", x))
    q, k, v = (a.reshape(len(x), heads, -1) for a in np.split(fused, 3, axis=1))
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)  # a power of two
    x = x + dense(block, "attn.out_proj", attend(q, k, v, slopes=slopes))
    return x + dense(
        block, "ffn.down_proj", gelu(dense(block, "ffn.up_proj", norm(block, "norm_2", x)))
    )


def falcon(block, x, fields):
    heads = fields["num_attention_heads"]
    h = norm(block, "input_layernorm", x)
    fused = dense(block, "self_attention.query_key_value", h).reshape(len(x), heads + 2, -1)
    q, k, v = fused[:, :heads], fused[:, heads : heads + 1], fused[:, heads + 1 :]
    attended = attend(q, *(np.repeat(a, heads, 1) for a in (k, v)), rotated=q.shape[-1])
    mlp = dense(block, "mlp.dense_4h_to_h", gelu(dense(block, "mlp.dense_h_to_4h", h)))
    return x + dense(block, "self_attention.dense", attended) + mlp


def attend(q, k, v, rotated=0, slopes=None):
    """[T,NH]: each query to the sinks and the newest keys, at their indices in the cache."""
    out = np.empty((len(q), q.shape[1], q.shape[2]))
    for t in range(len(q)):
        cached = [s for s in range(t + 1) if s < SINKS or s > t - WINDOW]
        at = np.arange(len(cached))
        keys, query = rotate(k[cached], at, rotated), rotate(q[t][None], at[-1:], rotated)[0]
        logits = np.einsum("nh,snh->ns", query, keys) * q.shape[-1] ** -0.5
        if slopes is not None:
            logits -= slopes[:, None] * (at[-1] - at)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[t] = np.einsum("ns,snh->nh", weights, v[cached])
    return out.reshape(len(q), -1)


def rotate(x, positions, rotated):
    """The first dims of [S,N,H], in pairs (i, i + rotated / 2)."""
    if not rotated:
        return x
    frequencies = 10000.0 ** (-np.arange(0, rotated, 2) / rotated)
    angles = (positions[:, None] * frequencies)[:, None]
    first, second = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
    turned = (first * np.cos(angles) - second * np.sin(angles),
              second * np.cos(angles) + first * np.sin(angles))  # fmt: skip
    return np.concatenate([*turned, x[..., rotated:]], axis=-1)


def dense(block, name, x):
    return x @ block[f"{name}.weight"].T + block.get(f"{name}.bias", 0.0)


def norm(block, name, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return normed * block[f"{name}.weight"] + block.get(f"{name}.bias", 0.0)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
