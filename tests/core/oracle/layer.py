"""One layer over one sequence under a rule, and attention over slots."""

from typing import Any, NamedTuple

import numpy as np

from tests.core.oracle.positions import rotate


class Inputs(NamedTuple):
    """The tokens of one KV head of one sequence.

    tokens, prompt: the length of the sequence, and of the prompt in it. rng: two uint32.
    q [T,G,H], k, v [T,H]: before rotation. start: position of the first token. slopes: ALiBi
    slopes of the query heads. head, layer_k [T,K,H]: which KV head this is, and the keys of all.
    layer_q [T,N,H]: the queries of all.
    cached: the tokens in the cache when it is compressed; None: all of the prompt. excess: of the
    first of these, so many share a position in the cache with the next one.
    """

    tokens: int
    prompt: int
    rng: Any
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    start: int = 0
    slopes: Any = None
    head: int = 0
    layer_k: Any = None
    cached: Any = None
    layer_q: Any = None
    excess: int = 0

    def of_head(self, head, **fields):
        """Those of another KV head of the layer, with other fields; its values are left out."""
        group = self.q.shape[1]
        q = self.layer_q[:, head * group : (head + 1) * group]
        return self._replace(head=head, q=q, k=self.layer_k[:, head], v=None, **fields)


def attention(
    q,
    k,
    v,
    rule,
    *,
    cache_relative=False,
    start=0,
    prompt=0,
    rngs=None,
    theta=None,
    slopes=None,
    scale=1.0,
    softcap=None,
    sink_logits=None,
):
    """One layer over one sequence: outputs [T,N,H], and the cached tokens by token and KV head.

    q [T,N,H], k, v [T,K,H]. cache_relative: the tokens in view have positions 0, 1, 2, ... and the
    query has the last of them; otherwise positions in the text. slopes: ALiBi.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = np.zeros((tokens, heads, head_dim))
    cached = [[None] * kv_heads for _ in range(tokens)]
    for kv in range(kv_heads):
        rng = None if rngs is None else rngs[kv]
        heads_of = range(kv * group, (kv + 1) * group)
        group_slopes = None if slopes is None else [slopes[n] for n in heads_of]
        head_qkv = q[:, heads_of], k[:, kv], v[:, kv]
        inputs = Inputs(tokens, prompt, rng, *head_qkv, start, group_slopes, kv, k, layer_q=q)
        for t, (view, after, *gaps) in enumerate(rule(inputs)):
            cached[t][kv] = after
            per_query_head = isinstance(view[0], list)
            for n, seen in zip(heads_of, view if per_query_head else [view] * group, strict=True):
                numbers = [number for number, *_ in seen]
                weights = np.array([weight for _, weight, *_ in seen])
                values = np.array([share[0] if share else 1.0 for _, _, *share in seen])[:, None]
                values = values * v[numbers, kv]
                place = np.array(gaps[0]) if gaps else np.arange(len(seen))
                place = place if cache_relative else np.array(numbers) + start
                keys, query = k[numbers, kv], q[t, n]
                if theta is not None:
                    keys = rotate(keys, place, theta)
                    query = rotate(query[None], place[-1:], theta)[0]
                logits = keys @ query * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                if slopes is not None:
                    logits = logits - slopes[n] * (place[-1] - place)
                logits = logits + weights
                extra = -np.inf if sink_logits is None else sink_logits[n]
                top = max(logits.max(), extra)
                e = np.exp(logits - top)
                out[t, n] = e @ values / (e.sum() + np.exp(extra - top))
    return out, cached


def softmax_attention(q, k, v, bias, scale=1.0, softcap=None):
    """Out and lse of q [B,T,N,H] over slots k, v [B,K,S,H] with bias [B,K,G,T,S]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    logits = np.einsum("btnh,bnsh->bnts", q, k) * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    shape = (q.shape[0], k.shape[1] // group, group, q.shape[1], k.shape[2])
    logits = logits + np.broadcast_to(np.asarray(bias, np.float64), shape).reshape(logits.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = logits.max(axis=-1, keepdims=True, initial=-1e300)
        e = np.exp(logits - top)
        total = e.sum(axis=-1, keepdims=True)
        out = np.where(total == 0, 0.0, np.einsum("bnts,bnsh->bnth", e, v) / total)
        lse = (top + np.log(total))[..., 0]
    return out.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)
