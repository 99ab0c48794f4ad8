"""Free memory of devices and the host, checked before a large allocation."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jaxkv.errors import UserError

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def available(device: jax.Device | None = None, host: bool = False) -> int | None:
    """Free bytes of a device; None where unknown.

    device: None is the first local device. host: return the host's free bytes instead, as for a CPU
    device.
    """
    device = device or jax.local_devices()[0]
    if device.platform != "cpu" and not host:
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    limits = [free for free in (_host_free(), _group_free()) if free is not None]
    return min(limits, default=None)


# Allocators of JAX that take their memory from a pool, and the variables of the pool's share.
_POOLS = ("default", "bfc", "cuda_async")
_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def reserved(platform: str, limit: int | None, environment: Mapping[str, str]) -> str | None:
    """A sentence on the memory that JAX reserves when it starts; None where it reserves none.

    platform: a device's. limit: bytes that its arrays may take, None where unknown. environment:
    variables of this process, which JAX has accepted.
    """
    preallocate = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in (
        "false",
        "False",
        "0",
    )
    pool = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() in _POOLS
    if platform != "gpu" or not limit or not preallocate or not pool:
        return None
    # JAX refuses both, so the advice names the one that is set.
    name = next((name for name in _SHARES if environment.get(name)), _SHARES[0])
    share = environment.get(name) or "0.75"
    return (
        f"JAX reserves {show(limit)} of each GPU's memory; set {name} below {share} to reserve "
        "less, or XLA_PYTHON_CLIENT_PREALLOCATE=false to reserve none"
    )


def _host_free() -> int | None:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


# Files with a container's limit, its use and the parts of that use: cgroup version 2, then 1.
_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def _group_free() -> int | None:
    """Free bytes under a container's limit; None without a limit."""
    for folder, limit_file, used, prefix in _GROUPS:
        try:
            parts = dict(x.split() for x in Path(folder, "memory.stat").read_text().splitlines())
            # The file cache counts as used, but the kernel frees it on demand.
            files = sum(int(parts[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
            limit = int(Path(folder, limit_file).read_text())
            if limit < 2**60:  # version 1 writes the largest number for no limit
                return limit - int(Path(folder, used).read_text()) + files
        except (OSError, ValueError, KeyError):  # absent, or `max`: no limit
            continue
    return None


def resident() -> int | None:
    """Bytes of physical memory that this process holds; None where unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


FEWER = "sequences or tokens, a smaller window or sample, or a policy of constant memory"


def check(
    needed: int,
    purpose: str,
    device: jax.Device | None = None,
    host: bool = False,
    fewer: str = FEWER,
) -> None:
    """Raise UserError if `needed` bytes for `purpose` exceed the free ones of a device or the host.

    fewer: what the error message advises to reduce.
    """
    free = available(device, host)
    if free is not None and needed > free:
        where = " of host memory" if host else ""
        raise UserError(
            f"{purpose} would take {show(needed)}{where} and only {show(free)} is free; take fewer "
            f"{fewer}"
        )


def check_host(purpose: str, device: jax.Device | None = None) -> None:
    """Raise UserError unless the device can access pinned host memory.

    purpose: the user's choice that needs pinned memory, for the message.
    """
    device = device or jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise UserError(
            f"{purpose} needs a platform with pinned host memory, and {device.platform} has "
            f"{', '.join(kinds)}; leave it out"
        )


class MemoryUse(NamedTuple):
    """Arrays in the memory of a device. advice: what lowers their bytes, to complete a message."""

    name: str
    nbytes: int
    advice: str


class OutOfMemory(UserError):
    """A device has too little memory; the message says what takes it."""


@contextlib.contextmanager
def explained(uses: Callable[[], Sequence[MemoryUse]], advice: str) -> Iterator[None]:
    """Raise OutOfMemory, with what takes the memory, where a device has too little.

    uses: the arrays that are in its memory. advice: what lowers the bytes of temporary arrays.
    Errors of a kernel that asks for too much of the memory on the chip stay as they are.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or ON_CHIP.search(str(error)):
            raise
        raise out_of_memory(str(error), uses(), advice) from error


ON_CHIP = re.compile(r"shared memory|\b[vsc]mem\b", re.IGNORECASE)
# Bytes that an allocation asked for, as XLA writes them: 24 bytes, 1.50GiB, 1.50G.
REQUESTED = re.compile(
    r"(?:allocat\w+|exceeded \w+ capacity by) ([\d.]+) ?(bytes|[KMGT](?=i?B?\b))", re.IGNORECASE
)


def out_of_memory(reason: str, uses: Sequence[MemoryUse], advice: str) -> OutOfMemory:
    """reason: the message of XLA. The other arguments are those of `explained`."""
    uses = [use for use in uses if use.nbytes]
    parts = [f"{use.name} take {show(use.nbytes)}" for use in uses]
    largest = max(uses, key=lambda use: use.nbytes, default=MemoryUse("", 0, advice))
    requested = REQUESTED.search(reason)
    if requested is not None:
        power = "bKMGT".index(requested[2][0])
        nbytes = float(requested[1]) * 1024**power
        parts.append(f"a program asked for {show(nbytes)} more")
        if nbytes > largest.nbytes:
            largest = MemoryUse("", 0, advice)
    return OutOfMemory(f"the device is out of memory: {', '.join(parts)}; give {largest.advice}")


def show(count: int | float) -> str:
    """A number of bytes in binary units, as in 3.2 GiB."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit == 0 else f"{count:.1f} {UNITS[unit]}"
