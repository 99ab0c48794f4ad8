"""The devices of this machine and their peak performance."""

from __future__ import annotations

import functools
import os
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

# Peak FLOP/s of dense bfloat16 products, from data sheets, by words of the device kind; the first
# match counts.
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
         "L4": 121e12, "v6 lite": 918e12, "v6e": 918e12, "v5 lite": 197e12, "v5e": 197e12,
         "v5p": 459e12, "v5": 459e12, "v4": 275e12}  # fmt: skip


def native_dtype(device: jax.Device) -> str:
    """The compute dtype of a device: bfloat16, or float32 where it has no bfloat16 units."""
    return "float32" if device.platform == "cpu" or _has_no_bfloat16(device) else "bfloat16"


def inference_dtype(published: str, overflows: bool = False) -> str:
    """The dtype of weights and caches on this machine, of a model that was published in another.

    A CPU takes float32. A GPU without bfloat16 units, such as a T4, takes float16 for bfloat16, and
    float32 where the hidden states of the model overflow float16.
    """
    if jax.default_backend() == "cpu":
        return "float32"
    if published != "bfloat16" or not _has_no_bfloat16(jax.local_devices()[0]):
        return published
    return "float32" if overflows else "float16"


def _has_no_bfloat16(device: jax.Device) -> bool:
    """Whether a device is an NVIDIA GPU without bfloat16 units."""
    capability = cuda_capability(device)
    return capability is not None and capability < 8


def cuda_capability(device: jax.Device) -> float | None:
    """The compute capability of an NVIDIA GPU; None of any other device."""
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return None
    return float(device.compute_capability)


@functools.cache
def peak() -> float:
    """Peak FLOP/s of one device: from the data sheet, or measured with a large product."""
    words = f" {jax.local_devices()[0].device_kind.replace('-', ' ')} "
    listed = next((flops for name, flops in PEAKS.items() if f" {name} " in words), None)
    return listed or measured_peak()


def measured_peak() -> float:
    """The best FLOP/s of a square matrix product in the device's native dtype."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    a = jnp.ones((size, size), native_dtype(jax.local_devices()[0]))
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def used_by(mesh: Mesh | None) -> str:
    """The devices in words: count and kind, or cores and processor of a CPU."""
    count, kind = 1 if mesh is None else mesh.size, jax.devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return f"{count} x {kind}"
    split = "" if count == 1 else f"{count} virtual devices on "
    return f"{split}{cores()} cores of {processor()}"


def processor() -> str:
    """The name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def cores() -> int | None:
    """The number of cores that this process may use, where the system reports it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
