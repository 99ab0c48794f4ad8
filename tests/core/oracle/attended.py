"""Rules of TOVA, R-KV, VaSE and TriAttention: which tokens of a cache stay.

Each returns choose(numbers, inputs), for `compressed` and `repeated`, or score(numbers, inputs),
for KV heads that compete. relative: positions count inside the cache.
"""

import numpy as np

from tests.core.oracle.draws import uniform
from tests.core.oracle.positions import rotate


def best(numbers, score, count):
    """The numbers with the highest scores, of equals the first."""
    return [numbers[i] for i in sorted(range(len(numbers)), key=lambda i: -score[i])[:count]]


def highest(score, count):
    """Choose the numbers with the highest scores."""
    return lambda numbers, inputs: best(numbers, score(numbers, inputs), count) if numbers else []


def in_cache(inputs, relative):
    """The cached tokens and their positions."""
    cached = list(range(inputs.prompt)) if inputs.cached is None else list(inputs.cached)
    if not relative:
        return cached, np.array(cached)
    return cached, np.maximum(np.arange(len(cached)) - inputs.excess, 0)


def softmax(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attended_by_newest(capacity, theta, scale, relative=False):
    """TOVA: the most attended by the newest query, on average over all query heads."""

    def choose(numbers, inputs):
        cached, place = in_cache(inputs, relative)
        kv_heads, group = inputs.layer_k.shape[1], inputs.q.shape[1]
        score = np.zeros(len(numbers))
        for head in range(kv_heads * group if numbers else 0):
            k = rotate(inputs.layer_k[cached, head // group], place, theta)
            q = rotate(inputs.layer_q[cached[-1:], head], place[-1:], theta)
            score += softmax(q @ k.T * scale)[0]
        return best(numbers, score, capacity)

    return choose


def attention_of_last(numbers, inputs, size, theta, scale, relative):
    """The logits [G,W,S] of the last `size` queries and the tokens before them."""
    cached, place = in_cache(inputs, relative)
    k = rotate(inputs.k[cached], place, theta)[: len(numbers)]
    last = range(len(cached) - size, len(cached))
    return np.array([
        [(k @ rotate(inputs.q[cached[i] : cached[i] + 1, head], place[i : i + 1], theta)[0]) * scale
         for i in last]
        for head in range(inputs.q.shape[1])
    ])  # fmt: skip


def around(values, kernel):
    """The neighbours of each place, with zeros beyond the ends."""
    padded = np.pad(values, kernel // 2)
    return np.array([padded[i : i + kernel] for i in range(len(values))])


def attended_without_like(capacity, size, **fields):
    """R-KV: the highest of its scores."""
    return highest(score_without_like(size, **fields), capacity - size)


def score_without_like(size, kernel, mix, threshold, theta, scale, relative=False):
    """R-KV: attention mixed with the redundancy of keys."""

    def score(numbers, inputs):
        logits = attention_of_last(numbers, inputs, size, theta, scale, relative)
        importance = around(softmax(logits.max(axis=0)).mean(axis=0), kernel).max(axis=1)
        cached, place = in_cache(inputs, relative)
        k = rotate(inputs.k[cached], place, theta)
        k = k / np.linalg.norm(k, axis=1)[:, None]
        cosine = k @ k.T
        np.fill_diagonal(cosine, 0)
        for row in cosine:
            alike = np.flatnonzero(row > threshold)
            row[alike[-1:]] = 0
        redundancy = softmax(cosine.mean(axis=0))[: len(numbers)]
        return mix * importance - (1 - mix) * redundancy

    return score


def large_and_drawn(capacity, sinks, size, large, kernel, theta, scale, relative=False):
    """VaSE: sinks and large values, and draws without replacement by attention."""

    def choose(numbers, inputs):
        if not numbers:
            return []
        logits = attention_of_last(numbers, inputs, size, theta, scale, relative)
        heads = [around(x, kernel).mean(axis=1) for x in softmax(logits).mean(axis=1)]
        attention = np.mean(heads, axis=0)
        extent = np.ptp(inputs.v[numbers], axis=1)
        extent[:sinks] = np.inf
        newest = (inputs.prompt - 1 + inputs.start) * 0x9E3779B1
        draw = [max(uniform(n + inputs.start + newest, inputs.rng), 2**-25) for n in numbers]
        score = np.log(attention) - np.log(-np.log(draw))
        score[np.argsort(-extent, kind="stable")[:large]] = np.inf
        return best(numbers, score, capacity - size)

    return choose


def attended_by_centres(capacity, **fields):
    """TriAttention: the highest of its scores."""
    return highest(score_by_centres(**fields), capacity)


def score_by_centres(furthest, theta, relative=False):
    """TriAttention: the trigonometric series of the mean query, and what the mean does not tell."""

    def score(numbers, inputs):
        _, place = in_cache(inputs, relative)
        frequencies, amplitude = theta if isinstance(theta, tuple) else (None, 1.0)
        half = inputs.k.shape[1] // 2
        if frequencies is None:
            frequencies = theta ** (-np.arange(half) / half)
        pairs = lambda x: x[..., :half] + 1j * x[..., half:]
        k, highest_score = pairs(inputs.k[numbers]), np.full(len(numbers), -np.inf)
        ahead = [2**i for i in range(furthest.bit_length())]
        for head in range(inputs.q.shape[1]):
            q = pairs(inputs.q[: inputs.prompt, head])
            mean, length = q.mean(axis=0), np.abs(q).mean(axis=0)
            phase = np.angle(mean * k.conj())
            distance = (place[-1] + 1 - place)[: len(numbers), None]
            series = [
                np.abs(mean) * np.abs(k) * np.cos(frequencies * (distance + offset) + phase)
                for offset in ahead
            ]
            terms = np.mean(series, axis=0) + (length - np.abs(mean)) * np.abs(k)
            total = amplitude**2 * terms.sum(axis=1)
            normalised = (total - total.mean()) / max(total.std(), 1e-6)
            highest_score = np.maximum(highest_score, normalised)
        return highest_score

    return score
