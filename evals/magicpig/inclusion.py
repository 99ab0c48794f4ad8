"""The inclusion probability of a key in MagicPIG, in float64; jaxkv computes it in float32.

u = I_P(2, L - 1), P = p^K, p = 1 - acos(c)/pi (2410.16179, section 4.3, eq. 10).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import betainc


def log_u(cosine: np.ndarray, bits: int, tables: int) -> np.ndarray:
    """log u of cosines, from its leading terms where u would underflow."""
    # The tangent gives the angle in full precision near cosines of -1 and 1.
    p = np.arctan2(np.sqrt((1 - cosine) * (1 + cosine)), -cosine) / math.pi
    log_p = bits * np.log(np.maximum(p, 1e-30))
    chance = np.exp(log_p)
    leading = 2 * log_p + math.log(math.comb(tables, 2))
    with np.errstate(divide="ignore"):
        log = np.log(betainc(2, tables - 1, chance))
    second = -2 / 3 * (tables - 2) * np.minimum(chance, 1e-8 / tables)
    return np.where(chance * tables < 1e-8, leading + np.log1p(second), log)


def u(cosine: np.ndarray, bits: int, tables: int) -> np.ndarray:
    return np.exp(log_u(cosine, bits, tables))


def isotropic(bits: int, tables: int, dims: int, points: int = 20_001) -> float:
    """The mean of u over keys of random direction in this many dimensions."""
    angle = np.linspace(0, math.pi, points)
    weight = np.sin(angle) ** (dims - 2)  # density of directions at this angle
    return float((u(np.cos(angle), bits, tables) * weight).sum() / weight.sum())
