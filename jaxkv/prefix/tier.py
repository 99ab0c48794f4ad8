"""Slots for snapshots in one memory, with those that are in them by when they were used."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of a cache that has absorbed the first `boundary` tokens of some prompt.

    key: of those tokens; data: they themselves, encoded. slot: where it is, in `tier`. ready:
    computed and stored; one that is not can be found by nobody. holds: readers it has now.
    """

    key: bytes
    data: bytes
    boundary: int
    slot: int
    tier: Tier
    ready: bool = False
    holds: int = 0


class Tier:
    """name: of the memory. slots: that it has, None for as many as are asked for."""

    def __init__(self, name: str, slots: int | None) -> None:
        self.name, self.slots = name, slots
        self.used: OrderedDict[Snapshot, None] = OrderedDict()  # the ready ones, oldest use first
        self._free: list[int] = []
        self._made = 0

    def take(self) -> int | None:
        """A slot that nothing is in; None where there is none."""
        if self._free:
            return self._free.pop()
        if self._made == self.slots:
            return None
        self._made += 1
        return self._made - 1

    def give(self, slot: int) -> None:
        """Take back a slot."""
        self._free.append(slot)

    def oldest(self) -> Snapshot | None:
        """The snapshot that was used least recently and that nobody reads; None without one."""
        return next((snapshot for snapshot in self.used if not snapshot.holds), None)

    @property
    def taken(self) -> int:
        """Slots that are not free."""
        return self._made - len(self._free)
