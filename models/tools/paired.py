"""Means of paired differences, with two standard errors from blocks of nearby tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.typing import Bool, Float


def paired(
    values: Float[np.ndarray, "S C"], block: int, counted: Bool[np.ndarray, "S C"] | None = None
) -> dict[str, Any]:
    """The mean of the counted values, with two standard errors from blocks within stretches.

    It is a ratio of block sums, so blocks may count unequally many values (Cochran 1977, 6.3).
    """
    counted = np.ones(values.shape, bool) if counted is None else counted
    starts = np.arange(0, values.shape[1], block)
    sums = np.add.reduceat(np.where(counted, values, 0.0), starts, axis=1).ravel()
    counts = np.add.reduceat(counted.astype(np.float64), starts, axis=1).ravel()
    total = int(counts.sum())
    if not total:
        return {"mean": None, "two_errors": None, "count": 0}
    mean, used = sums.sum() / total, int((counts > 0).sum())
    error = None
    if used > 1:
        spread = np.sum((sums - mean * counts) ** 2) * used / (used - 1)
        error = float(2 * np.sqrt(spread) / total)
    return {"mean": float(mean), "two_errors": error, "count": total}


def is_noise(difference: Mapping[str, Any]) -> bool:
    """Whether a paired difference is within two standard errors of 0."""
    error = difference["two_errors"]
    return error is None or abs(difference["mean"]) <= error


def show(difference: Mapping[str, Any] | None, sign: str = "+") -> str:
    """A paired difference with its two standard errors; a dash where there is none."""
    if difference is None or difference["mean"] is None:
        return "-"
    error = difference["two_errors"]
    return f"{difference['mean']:{sign}.3f}" + ("" if error is None else f" ± {error:.3f}")
