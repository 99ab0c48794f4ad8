"""What Triton, by which Pallas writes kernels for NVIDIA's GPUs, needs of the machine."""

from __future__ import annotations

import jax


def runs() -> bool:
    """Whether every GPU that is here is of capability 8.0 or later, which Triton's kernels need."""
    here = [device for device in jax.local_devices() if device.platform == "gpu"]
    return all(_capability(device) >= 8 for device in here)


def _capability(device: jax.Device) -> float:
    """Of a GPU of NVIDIA's; 0 where it is no number, as of one of AMD's (gfx90a)."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except (TypeError, ValueError):
        return 0.0
