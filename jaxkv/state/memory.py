"""How much memory there is, asked before anything large is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jaxkv.errors import UserError

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def available(device: jax.Device | None = None, host: bool = False) -> int | None:
    """Bytes free on a device, for a CPU and with `host` those of the host; None where nobody can
    tell."""
    device = device or jax.local_devices()[0]
    if device.platform != "cpu" and not host:
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    known = [free for free in (_host_free(), _group_free()) if free is not None]
    return min(known, default=None)


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


# Where a container's limit, its use and the parts of that use stand: cgroup version 2, then 1.
_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def _group_free() -> int | None:
    """Bytes that a container's limit leaves; None where there is no limit."""
    for folder, most, used, prefix in _GROUPS:
        try:
            parts = dict(x.split() for x in Path(folder, "memory.stat").read_text().splitlines())
            # Pages of files that were read count as used, and are given back when asked for.
            files = sum(int(parts[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
            limit = int(Path(folder, most).read_text())
            if limit < 2**60:  # version 1 writes no limit as the largest number it has
                return limit - int(Path(folder, used).read_text()) + files
        except (OSError, ValueError, KeyError):  # absent, or `max`: no limit
            continue
    return None


FEWER = "rows or tokens, a smaller window or sample, or a policy with a fixed memory"


def check(
    needed: int,
    what: str,
    device: jax.Device | None = None,
    host: bool = False,
    fewer: str = FEWER,
) -> None:
    """Raise UserError if `needed` bytes for `what` cannot fit on a device, or the host.

    fewer: of what to take fewer.
    """
    free = available(device, host)
    if free is not None and needed > free:
        where = " in the memory of the host" if host else ""
        raise UserError(
            f"{what} would take {show(needed)}{where} and only {show(free)} is free; take fewer "
            f"{fewer}"
        )


def check_host(what: str, device: jax.Device | None = None) -> None:
    """Raise UserError for what a user chose where a device cannot reach the host's memory."""
    device = device or jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise UserError(
            f"{what} wants a platform with pinned host memory, and {device.platform} has "
            f"{', '.join(kinds)}; leave it out"
        )


def show(count: int | float) -> str:
    """A count of bytes as people read it."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit == 0 else f"{count:.1f} {UNITS[unit]}"
