"""A limit of Linux: 65,530 memory maps per process, at which XLA:CPU crashes.

A program of all layers of SmolLM2-135M takes hundreds.
"""

from __future__ import annotations

import gc
from pathlib import Path

MAPS = Path("/proc/self/maps")
MAX_MAPS = 50_000  # one more part may take thousands


def count() -> int:
    """The memory maps of this process; 0 where that is not known."""
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


def release(max_maps: int = MAX_MAPS) -> bool:
    """Clear compiled programs if the process has more memory maps; returns whether it did."""
    if count() <= max_maps:
        return False
    import jax

    jax.clear_caches()
    gc.collect()
    return True
