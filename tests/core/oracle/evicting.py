"""Rules of caches that evict token by token."""

import math

import numpy as np

from tests.core.oracle.draws import priority
from tests.core.oracle.positions import rotate


def full():
    """Every token."""
    return streaming(0, 10**9)


def window(size):
    """The newest tokens."""
    return streaming(0, size)


def streaming(sinks, size):
    """Sinks and a window: the first tokens and the newest ones."""

    def rule(inputs):
        cached = []
        for number in range(inputs.tokens):
            cached.append((number, 0.0))
            if len(cached) > sinks + size:
                del cached[sinks]
            yield list(cached), list(cached)

    return rule


def reservoir(sinks, size, sample, scheme="uniform", weighted=1):
    """Sinks, a window, and a sample of the evicted tokens, updated at each eviction.

    weighted: the exponent of a sampled token's weight, 0 if it counts once.
    """

    def rule(inputs):
        first, newest, sampled, num_evicted = [], [], [], 0
        for number in range(inputs.tokens):
            (first if len(first) < sinks else newest).append(number)
            if len(newest) > size:
                evicted = newest.pop(0)
                draw = priority(evicted + inputs.start, inputs.rng)
                if num_evicted < sample:
                    sampled.append(evicted)
                elif scheme == "uniform":
                    worst = max(sampled, key=lambda n: priority(n + inputs.start, inputs.rng))
                    if draw < priority(worst + inputs.start, inputs.rng):
                        sampled[sampled.index(worst)] = evicted
                elif draw % (sample + 1) < sample:
                    sampled[draw % (sample + 1)] = evicted
                num_evicted += 1
            weight = weighted * math.log(max(1, num_evicted / sample))
            view = [(n, 0.0) for n in first + newest] + [(n, weight) for n in sampled]
            yield sorted(view), sorted(view)

    return rule


def heavy_hitters(heavy, size, theta, scale):
    """H2O: a window, and the older tokens with the most attention so far."""

    def rule(inputs):
        cached, score = [], {}
        place = np.arange(inputs.tokens)
        k = inputs.k if theta is None else rotate(inputs.k, place, theta)
        for number in range(inputs.tokens):
            if len(cached) == heavy + size:
                cached.remove(min(cached[: heavy + 1], key=lambda n: (score[n], n)))
            cached.append(number)
            score[number] = 0.0
            for query in inputs.q[number]:
                query = query if theta is None else rotate(query[None], [number], theta)[0]
                e = np.exp(k[cached] @ query * scale)
                for n, share in zip(cached, e / e.sum(), strict=True):
                    score[n] += share
            yield [(n, 0.0) for n in cached], [(n, 0.0) for n in cached]

    return rule
