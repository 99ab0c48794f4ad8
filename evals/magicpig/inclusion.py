"""The inclusion probability of a key in MagicPIG, in float64; jaxkv computes it in float32.

u = I_P(least, L - least + 1), P = p^K, p = 1 - acos(c)/pi (2410.16179, section 4.2).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import betainc, ndtr, owens_t


def log_u(cosine: np.ndarray, bits: int, tables: int, least: int = 2) -> np.ndarray:
    """log u of cosines, from its leading terms where u would underflow."""
    # The tangent gives the angle in full precision near cosines of -1 and 1.
    p = np.arctan2(np.sqrt((1 - cosine) * (1 + cosine)), -cosine) / math.pi
    log_p = bits * np.log(np.maximum(p, 1e-30))
    chance = np.exp(log_p)
    leading = least * log_p + math.log(math.comb(tables, least))
    with np.errstate(divide="ignore"):
        log = np.log(betainc(least, tables - least + 1, chance))
    second = -least * (tables - least) / (least + 1) * np.minimum(chance, 1e-8 / tables)
    return np.where(chance * tables < 1e-8, leading + np.log1p(second), log)


def cross_polytope(angle: float, directions: int, points: int = 160) -> float:
    """The probability that two vectors at an angle have the same nearest of m normal directions, on
    the same side. It is 2m times the integral, over both products with one direction, of their
    density times the probability that the other m - 1 products are smaller."""
    x, weight = np.polynomial.legendre.leggauss(points)
    # Sum and difference of the two products are independent, with these deviations over root 2.
    sure, apart = math.sqrt(2) * math.cos(angle / 2), math.sqrt(2) * math.sin(angle / 2)
    far = 9.0
    sums = (x + 1) / 2 * far
    wide = np.minimum(far, sums * sure / apart)[:, None]
    s, d = sure * sums[:, None], apart * wide * x[None]
    density = np.exp(-(sums[:, None] ** 2 + (wide * x[None]) ** 2) / 2) / (2 * math.pi)
    within = _within((s + d) / math.sqrt(2), (s - d) / math.sqrt(2), math.cos(angle))
    each = (weight * far / 2)[:, None] * weight[None] * wide
    return float(2 * directions * np.sum(each * density * within ** (directions - 1)))


def _within(a: np.ndarray, b: np.ndarray, r: float) -> np.ndarray:
    """P(|X| < a, |Y| < b) of normal numbers with correlation r, by Owen's T (1956)."""
    root = math.sqrt((1 - r) * (1 + r))

    def below(h: np.ndarray, k: np.ndarray) -> np.ndarray:
        tails = owens_t(h, (k - r * h) / (h * root)) + owens_t(k, (h - r * k) / (k * root))
        return (ndtr(h) + ndtr(k)) / 2 - tails - np.where(h * k < 0, 0.5, 0.0)

    return np.clip(below(a, b) - below(-a, b) - below(a, -b) + below(-a, -b), 0, 1)


def u(cosine: np.ndarray, bits: int, tables: int, least: int = 2) -> np.ndarray:
    return np.exp(log_u(cosine, bits, tables, least))


def orthogonal(bits: int, tables: int) -> float:
    """Equation 21: the selected share of keys at right angles to the query."""
    return float(betainc(2, tables - 1, 0.5**bits))


def isotropic(bits: int, tables: int, dims: int, points: int = 20_001) -> float:
    """The mean of u over keys of random direction in this many dimensions."""
    angle = np.linspace(0, math.pi, points)
    weight = np.sin(angle) ** (dims - 2)  # density of directions at this angle
    return float((u(np.cos(angle), bits, tables) * weight).sum() / weight.sum())
