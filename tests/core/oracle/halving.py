"""Halving a block of tokens."""

import math

import numpy as np

from tests.core.oracle.positions import rotate


def by_coin(numbers, uniforms, inputs):
    """One of each two neighbours, by a fair coin."""
    return [numbers[i] if uniforms[i] < 0.5 else numbers[i + 1] for i in range(0, len(numbers), 2)]


def by_pairs(theta, scale, key_scale, c, cache_relative=False):
    """A self-balancing walk over the differences of neighbours, with random signs."""

    def choose(numbers, uniforms, inputs):
        steps = len(numbers) // 2
        phi = gram(numbers, inputs.k, inputs.v, theta, scale, key_scale, cache_relative)
        pick = np.zeros((steps, len(numbers)))
        pick[np.arange(steps), 2 * np.arange(steps)] = 1
        pick[np.arange(steps), 2 * np.arange(steps) + 1] = -1
        signs = walk(pick @ phi @ pick.T, uniforms[::2], c)
        return [numbers[2 * i + (signs[i] < 0)] for i in range(steps)]

    return choose


def by_walk(theta, scale, key_scale, c, cache_relative=False):
    """A self-balancing walk over tokens. Random signs change until each has half of the tokens."""

    def choose(numbers, uniforms, inputs):
        phi = gram(numbers, inputs.k, inputs.v, theta, scale, key_scale, cache_relative)
        signs = walk(phi, uniforms, c)
        order = lambda i: (signs[i] < 0, uniforms[i] * 4096 % 1)
        first = sorted(range(len(numbers)), key=order)[: len(numbers) // 2]
        return [numbers[i] for i in sorted(first)]

    return choose


def gram(numbers, keys, values, theta, scale, key_scale, cache_relative):
    """exp(<k,k'>) (<v,v'> + 1) of these tokens. Keys are centred; values are at most 1 long."""
    k, v = keys[numbers], values[numbers]
    if theta is not None:
        k = rotate(k, np.arange(len(numbers)) if cache_relative else np.array(numbers), theta)
    k = (k - k.mean(0)) * math.sqrt(key_scale * scale)
    v = v / np.sqrt((v**2).sum(1).max())
    return np.exp(k @ k.T) * (v @ v.T + 1)


def walk(gram, uniforms, c):
    """Signs: +1 with probability 1/2 - s/(2c). Vectors are scaled to length 1 at most."""
    gram = gram / gram.diagonal().max()
    s, signs = np.zeros(len(gram)), []
    for i, draw in enumerate(uniforms):
        signs.append(1 if s[i] / (2 * c) < 0.5 - draw else -1)
        s += signs[-1] * gram[i]
    return signs
