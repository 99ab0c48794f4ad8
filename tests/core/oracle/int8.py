"""Rows as a cache in int8 stores them."""

import ml_dtypes
import numpy as np

from tests.core.oracle.positions import rotate_heads


def in_int8(rows):
    """Rows [...,H] as a cache in int8 has them: whole multiples of one bfloat16 scale per row."""
    scale = (np.abs(rows).max(axis=-1, keepdims=True) / 127).astype(ml_dtypes.bfloat16)
    scale = scale.astype(np.float64)
    return np.clip(np.rint(rows / np.where(scale > 0, scale, 1)), -127, 127) * scale


def stored_in_int8(k, v, exact, theta, start=0):
    """The tokens [T,K,H] of such a cache, keys before rotation: the first `exact` as they are."""
    rotated = k
    if theta is not None:
        rotated = rotate_heads(k, start + np.arange(len(k)), theta)
    restored = in_int8(rotated)
    if theta is not None:
        restored = rotate_heads(restored, -start - np.arange(len(k)), theta)
    later = np.arange(len(k))[:, None, None] >= exact
    return np.where(later, restored, k), np.where(later, in_int8(v), v)
