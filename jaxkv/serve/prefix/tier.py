"""The entries of one memory in order of use, and transfers between two memories."""

from __future__ import annotations

from typing import Generic, NamedTuple

from jaxkv.serve.prefix.owners import FairLRU, OwnedItem, Shares


class Transfer(NamedTuple):
    """A copy from an entry of one memory to an entry of another, still to be done."""

    source: str
    source_index: int
    target: str
    target_index: int


class Tier(Generic[OwnedItem]):
    """Entries of one memory by number.

    name: device or host. capacity: number of entries; None for as many as are taken. used: the
    items that lookups can find. shares: the owners' shares of the entries.
    """

    def __init__(self, name: str, capacity: int | None, shares: Shares) -> None:
        self.name, self.capacity = name, capacity
        self.used: FairLRU[OwnedItem] = FairLRU(shares)
        self._free: list[int] = []
        self._made = 0

    def take(self) -> int | None:
        """The number of an empty entry, or None if there is none."""
        if self._free:
            return self._free.pop()
        if self._made == self.capacity:
            return None
        self._made += 1
        return self._made - 1

    def give_back(self, index: int) -> None:
        """Mark an entry as empty."""
        self._free.append(index)

    @property
    def taken(self) -> int:
        """The number of entries that are not empty."""
        return self._made - len(self._free)
