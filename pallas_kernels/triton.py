"""Requirements of Triton, the language in which Pallas compiles kernels for NVIDIA GPUs."""

from __future__ import annotations

import jax


def is_supported() -> bool:
    """Whether every local GPU has compute capability 8.0 or later, which the kernels need."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    return all(_capability(device) >= 8 for device in gpus)


def _capability(device: jax.Device) -> float:
    """The compute capability; 0 where it is not a number, as for AMD GPUs (gfx90a)."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except (TypeError, ValueError):
        return 0.0
