"""Tensors in files, host buffers for them, and their way to the devices, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from jaxkv.errors import UserError, first_few
from jaxkv.models.loading.weight_names import TensorPart

ALIGN = 64  # JAX on CPU adopts a host buffer with this alignment instead of copying it

ByteProgress = Callable[[int, int], None]
Store = Callable[[str, np.ndarray], Any] | None
Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor: its name in the file; `start` in bytes from the file's beginning.

    type: the name of its safetensors dtype, or the number of its ggml type. shape: its shape in
    row-major order, so (out, in) for a matrix. part: the part of the stored tensor that has this
    shape; None for all of it. members: the tensors that are stacked to this one, the first of which
    the other fields describe.
    """

    file: Path
    name: str
    type: str | int
    shape: tuple[int, ...]
    start: int
    bytes: int
    part: TensorPart | None = None
    members: tuple[Tensor, ...] = ()


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


def match(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[str, tuple[int, ...]]],
    where: Path,
    described: str,
    others: Collection[str] = (),
    remedies: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Our name -> tensor.

    tensors: by their names in the file. expected: our name -> name in the file and shape. where:
    the folder or file, described: what gives the shapes, for error messages. others: names that are
    no weights. remedies: by the name of a missing tensor.
    Raises UserError for tensors that are missing, unknown, or of another shape.
    """
    known = {name for name, _ in expected.values()} | set(others)
    lacking = [n for n in dict.fromkeys(n for n, _ in expected.values()) if n not in tensors]
    extra = [tensor.name for name, tensor in tensors.items() if name not in known]
    if lacking or extra:
        problems = [f"missing tensor {first_few(lacking)}"] if lacking else []
        problems += [f"extra tensor {first_few(extra)}"] if extra else []
        problems += [text for name, text in (remedies or {}).items() if name in lacking]
        raise UserError(
            f"the weights in {where} are not those that {described} describes: "
            f"{'; '.join(problems)}; download it again"
        )
    matched = {name: tensors[name_in_file] for name, (name_in_file, _) in expected.items()}
    wrong = [
        f"{tensor.name} in {tensor.file.name} is {list(tensor.shape)}, {described} says "
        f"{list(expected[name][1])}"
        for name, tensor in matched.items()
        if tensor.shape != expected[name][1]
    ]
    if wrong:
        raise UserError(f"wrongly shaped tensor in {where}: {first_few(wrong)}; download it again")
    return matched


def corrupt(path: Path, why: str) -> UserError:
    """The error for a damaged file."""
    return UserError(f"{path} is truncated or corrupt: {why}; download it again")


def place_all(
    tensors: Mapping[str, Tensor],
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
    sharding: Sharding = None,
    progress: ByteProgress | None = None,
    store: Store = None,
) -> dict[str, Any]:
    """Read tensors one by one and place each on its devices; returns them by our names.

    read: our name to the host array of `dtype`, or to what is placed instead. sharding: one for
    all, or a function (name, shape) -> one; None is JAX's default device. progress: called with
    (bytes done, all bytes). store: a name and its host array to what is placed instead, such as a
    quantised matrix.
    """
    total = sum(prod(tensor.shape) for tensor in tensors.values()) * dtype.itemsize
    done, placed = 0, {}
    # Largest first: the tensor in memory twice is then small beside the finished ones.
    for name in sorted(tensors, key=lambda name: -prod(tensors[name].shape)):
        shape, host = tensors[name].shape, read(name)
        spec = sharding(name, shape) if callable(sharding) else sharding
        done += prod(shape) * dtype.itemsize
        stored = host if store is None else store(name, host)
        # Waiting bounds the host copies alive at a time to one tensor.
        placed[name] = jax.block_until_ready(jax.tree.map(lambda a: _place(a, spec), stored))  # noqa: B023
        if progress:
            progress(done, total)
    return {name: placed[name] for name in tensors}


def _place(host: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(host)
    # Each process passes on only the parts of its own devices.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
