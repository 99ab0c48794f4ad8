"""A decoder of the Llama family in plain numpy."""

from collections.abc import Mapping, Sequence

import numpy as np

from tests.core.oracle.layer import attention


def rms_norm(x, gain, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def logits(weights: Mapping[str, np.ndarray], ids: Sequence[int], head_dim, eps, theta, rules):
    """The logits [T,V] of a text. theta: as of `rotate`. rules: which keys a query sees, by layer.

    weights: by our names; biases and gains of q and k where the model has them.
    """
    weights = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}
    x = weights["embed"][list(ids)]
    for layer, rule in enumerate(rules):
        of_layer = {
            name.removeprefix(f"layers.{layer}."): weight for name, weight in weights.items()
        }

        def linear(h, name, of_layer=of_layer):
            return h @ of_layer[name].T + of_layer.get(f"{name}_bias", 0.0)

        h = rms_norm(x, of_layer["attn_norm"], eps)
        q, k, v = (linear(h, name).reshape(len(x), -1, head_dim) for name in "qkv")
        if "q_norm" in of_layer:
            q, k = rms_norm(q, of_layer["q_norm"], eps), rms_norm(k, of_layer["k_norm"], eps)
        out, _ = attention(q, k, v, rule, theta=theta, scale=head_dim**-0.5)
        x = x + linear(out.reshape(len(x), -1), "o")
        h = rms_norm(x, of_layer["mlp_norm"], eps)
        gate = linear(h, "gate")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, "up"), "down")
    return rms_norm(x, weights["norm"], eps) @ weights.get("head", weights["embed"]).T
