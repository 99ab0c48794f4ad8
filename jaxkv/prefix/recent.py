"""Keys that were seen not long ago."""

from __future__ import annotations

from collections.abc import Iterable


class Recent:
    """A set of at most `room` keys, two at least, which keeps the newest half of them for sure."""

    def __init__(self, room: int) -> None:
        self._half = room // 2
        self._new: set[bytes] = set()
        self._old: set[bytes] = set()

    def add(self, key: bytes) -> None:
        """Put in a key, as the newest where it was in before."""
        self._new.add(key)
        if len(self._new) == self._half:
            self._old, self._new = self._new, set()

    def clear(self) -> None:
        self._old, self._new = set(), set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._new or key in self._old

    def among(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of some keys that are in it."""
        keys = set(keys)
        return (keys & self._new) | (keys & self._old)
