"""What of a store lies in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxkv.prefix.tier import Move
from jaxkv.state import memory


class Host:
    """Arrays in the memory of the host, in so many slots of so many bytes.

    Raises UserError where they do not fit into it.
    """

    def __init__(self, slots: int, size: int) -> None:
        self.slots = slots
        self._held: dict[int, tuple[Any, Any]] = {}
        if slots:
            memory.check(slots * size, f"{slots} prefixes", host=True, fewer="host_slots")
            memory.check_host("host_slots")

    def put(self, slot: int, arrays: Any, about: Any) -> None:
        self._held[slot] = jax.device_put(arrays, _memory("pinned_host")), about

    def take(self, slot: int) -> tuple[Any, Any]:
        arrays, about = self._held.pop(slot)
        return jax.device_put(arrays, _memory("device")), about

    def clear(self) -> None:
        self._held.clear()


def move(moves: list[Move], host: Host, take: Callable, put: Callable) -> None:
    """Do in turn what an index has decided.

    take: (slot of the device) -> arrays and what else belongs to them; put: (slot, both).
    """
    for each in moves:
        if each.source == "device":
            host.put(each.target_slot, *take(each.source_slot))
        else:
            put(each.target_slot, *host.take(each.source_slot))
    moves.clear()


def _memory(kind: str) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=kind)
