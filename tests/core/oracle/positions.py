"""Rotations of queries and keys by the formulas."""

import math

import numpy as np


def rotate(x, positions, theta):
    """Rotary embedding of x [T,H] by the formula, over pairs (i, i + H/2)."""
    half = x.shape[-1] // 2
    if not isinstance(theta, tuple):
        theta = theta ** (-np.arange(half) / half), 1.0
    frequencies, amplitude = theta
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    cos, sin = amplitude * np.cos(angles), amplitude * np.sin(angles)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def yarn(head_dim, theta, factor, context, fast, slow):
    """YaRN: slow the pairs with at most `slow` rotations per context, and none from `fast` on."""
    i = np.arange(head_dim // 2)
    frequencies = theta ** (-2 * i / head_dim)
    low, high = (
        head_dim * math.log(context / (2 * math.pi * rotations)) / (2 * math.log(theta))
        for rotations in (fast, slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
    slowed = np.clip((i - low) / (high - low), 0, 1)
    return frequencies * (slowed / factor + 1 - slowed), 0.1 * math.log(factor) + 1


def rotate_heads(x, positions, theta):
    """`rotate` for x [T,N,H]."""
    return np.stack([rotate(x[:, n], positions, theta) for n in range(x.shape[1])], axis=1)
