"""The part of a prefix store that lies in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxkv.serve.prefix.tier import Transfer
from jaxkv.state import memory


class HostTier:
    """Arrays in the host's memory by entry number.

    capacity: entries. size: bytes of one. Raises UserError if they do not fit into memory.
    """

    def __init__(self, capacity: int, size: int) -> None:
        self.capacity = capacity
        self._entries: dict[int, tuple[Any, Any]] = {}
        if capacity:
            memory.check(
                capacity * size, f"{capacity} prefixes", host=True, fewer="bytes for prefixes"
            )
            memory.check_host("a prefix cache in host memory")

    def put(self, index: int, arrays: Any, extra: Any) -> None:
        self._entries[index] = jax.device_put(arrays, _memory("pinned_host")), extra

    def get(self, index: int) -> tuple[Any, Any]:
        """The arrays of an entry, which stays."""
        return self._entries[index]

    def take(self, index: int) -> tuple[Any, Any]:
        arrays, extra = self._entries.pop(index)
        return jax.device_put(arrays, _memory("device")), extra

    def clear(self) -> None:
        self._entries.clear()


def transfer(transfers: list[Transfer], host: HostTier, take: Callable, put: Callable) -> None:
    """Do the transfers that an index has decided, in order, and clear the list.

    take: entry of the device -> its arrays and extra data. put: stores both in an entry.
    """
    for move in transfers:
        if move.source == "device":
            host.put(move.target_index, *take(move.source_index))
        else:
            put(move.target_index, *host.take(move.source_index))
    transfers.clear()


def _memory(kind: str) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=kind)
