"""Slots of one memory, with what is in them by when it was used, and moves between two."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable


class Move(NamedTuple):
    """Something to be copied from a slot of one memory to a slot of another."""

    source: str
    source_slot: int
    target: str
    target_slot: int


@runtime_checkable
class Shared(Protocol):
    """What lies in a slot. refs: readers it has now."""

    refs: int


Item = TypeVar("Item", bound=Shared)


class Tier(Generic[Item]):
    """name: of the memory. slots: that it has, None for as many as are asked for."""

    def __init__(self, name: str, slots: int | None) -> None:
        self.name, self.slots = name, slots
        self.used: OrderedDict[Item, None] = OrderedDict()  # that can be found, oldest use first
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

    def oldest(self) -> Item | None:
        """What was used least recently and nobody reads; None without such."""
        return next((item for item in self.used if not item.refs), None)

    @property
    def taken(self) -> int:
        """Slots that are not free."""
        return self._made - len(self._free)
