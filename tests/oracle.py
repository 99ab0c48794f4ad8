"""What the policies mean, in plain float64 numpy, one token at a time. Imports nothing of jaxkv.

A rule says which tokens are in view and which are held afterwards. It is called with a row's
number of tokens, how many of them were its prompt, and a random key, and yields for each token
(view, held), two lists of (number, log weight) in the order of the text.
"""

import math

import numpy as np


def full():
    """Every token."""
    return streaming(0, 10**9)


def window(size):
    """The newest tokens."""
    return streaming(0, size)


def streaming(sinks, size):
    """The first tokens and the newest."""

    def rule(tokens, prompt, key):
        held = []
        for number in range(tokens):
            held.append((number, 0.0))
            if len(held) > sinks + size:
                del held[sinks]
            yield list(held), list(held)

    return rule


def halving(sinks):
    """Every token, but of a finished prompt the first and every second one behind them."""

    def rule(tokens, prompt, key):
        held = []
        for number in range(tokens):
            if number == prompt:
                held = held[:sinks] + held[sinks::2]
            held.append((number, 0.0))
            yield list(held), list(held)

    return rule


def sampling(sinks, size, sample, start=0):
    """First and newest tokens, and of those between the `sample` with the lowest priorities.

    A query sees what was held before it came, and itself.
    """

    def rule(tokens, prompt, key):
        first, newest, middle = [], [], []
        for number in range(tokens):
            drawn = sorted(middle, key=lambda n: priority(n + start, key))[:sample]
            weight = math.log(len(middle) / sample) if len(middle) > sample else 0.0
            before = [(n, 0.0) for n in first + newest] + [(n, weight) for n in drawn]
            (first if len(first) < sinks else newest).append(number)
            if len(newest) > size:
                middle.append(newest.pop(0))
            drawn = sorted(middle, key=lambda n: priority(n + start, key))[:sample]
            weight = math.log(len(middle) / sample) if len(middle) > sample else 0.0
            held = [(n, 0.0) for n in first + newest] + [(n, weight) for n in drawn]
            yield sorted([*before, (number, 0.0)]), sorted(held)

    return rule


def priority(position, key):
    """The draw of a position: two rounds of an integer hash, one-to-one for each key."""
    return _mix(_mix((position + int(key[0])) % 2**32) ^ int(key[1]))


def _mix(x):
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
    x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
    return x ^ (x >> 15)


def attention(
    q,
    k,
    v,
    rule,
    *,
    by_rank=False,
    start=0,
    prompt=0,
    keys=None,
    theta=None,
    slopes=None,
    scale=1.0,
    softcap=None,
    sink=None,
):
    """One layer over one row: outputs [T,N,H], and for each token and kv head what is held.

    q [T,N,H], k, v [T,K,H]. by_rank: the tokens in view stand at 0, 1, 2, ... and the query at
    the last of them; otherwise where they stand in the text. theta: rotary base. slopes: ALiBi.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = np.zeros((tokens, heads, head_dim))
    held = [[None] * kv_heads for _ in range(tokens)]
    for kv in range(kv_heads):
        key = None if keys is None else keys[kv]
        for t, (view, after) in enumerate(rule(tokens, prompt, key)):
            held[t][kv] = after
            numbers = [number for number, _ in view]
            weights = np.array([weight for _, weight in view])
            place = np.arange(len(view)) if by_rank else np.array(numbers) + start
            turned = k[numbers, kv]
            if theta is not None:
                turned = rotate(turned, place, theta)
            for n in range(kv * group, (kv + 1) * group):
                query = q[t, n]
                if theta is not None:
                    query = rotate(query[None], place[-1:], theta)[0]
                logits = turned @ query * scale
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                if slopes is not None:
                    logits = logits - slopes[n] * (place[-1] - place)
                logits = logits + weights
                extra = -np.inf if sink is None else sink[n]
                top = max(logits.max(), extra)
                e = np.exp(logits - top)
                out[t, n] = e @ v[numbers, kv] / (e.sum() + np.exp(extra - top))
    return out, held


def rotate(x, positions, theta):
    """Rotary embedding of x [T,H], pairs (i, i + H/2), from the formula."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def softmax_attention(q, k, v, bias, scale=1.0, softcap=None):
    """q [B,T,N,H] over slots k, v [B,K,S,H] with bias [B,K,G,T,S]: out and lse."""
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


def rotate_heads(x, positions, theta):
    """`rotate` for x [T,N,H]."""
    return np.stack([rotate(x[:, n], positions, theta) for n in range(x.shape[1])], axis=1)
