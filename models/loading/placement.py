"""Tensors in files, host buffers for them, and their way to the devices, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

ALIGN = 64  # JAX on CPU adopts a host buffer with this alignment instead of copying it

ByteProgress = Callable[[int, int], None]
Store = Callable[[str, np.ndarray], Any] | None
Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor: its name in the file; `start` in bytes from the file's beginning.

    type: the name of its safetensors dtype, or the number of its ggml type. shape: its shape in
    row-major order, so (out, in) for a matrix.
    """

    file: Path
    name: str
    type: str | int
    shape: tuple[int, ...]
    start: int
    bytes: int


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised host array that JAX on CPU adopts without a copy."""
    size = prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGN, np.uint8)
    first = -raw.ctypes.data % ALIGN
    return raw[first : first + size].view(dtype).reshape(shape)


def fill(stream: BinaryIO, array: np.ndarray) -> bool:
    """Read until `array` is full, since one read of a raw file may return less.

    False where the file ends before.
    """
    rest = memoryview(array.view(np.uint8))
    while len(rest):
        got = stream.readinto(rest)
        if not got:
            return False
        rest = rest[got:]
    return True


def place_all(
    tensors: Iterable[tuple[str, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
    sharding: Sharding = None,
    progress: ByteProgress | None = None,
    store: Store = None,
) -> dict[str, Any]:
    """Read tensors one by one and place each on its devices; returns them by name.

    tensors: names and shapes, in the order of reading. read: a name to its host array of `dtype`,
    or to what is placed instead.
    sharding: one for all, or a function (name, shape) -> one; None is JAX's default device.
    progress: called with (bytes done, all bytes). store: a name and its host array to what is
    placed instead, such as a quantised matrix.
    """
    tensors = list(tensors)
    total = sum(prod(shape) for _, shape in tensors) * dtype.itemsize
    done, placed = 0, {}
    for name, shape in tensors:
        host = read(name)
        spec = sharding(name, shape) if callable(sharding) else sharding
        done += prod(shape) * dtype.itemsize
        stored = host if store is None else store(name, host)
        # Waiting bounds the host copies alive at a time to one tensor.
        placed[name] = jax.block_until_ready(jax.tree.map(lambda a: _place(a, spec), stored))  # noqa: B023
        if progress:
            progress(done, total)
    return placed


def _place(host: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(host)
    # Each process passes on only the parts of its own devices.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
