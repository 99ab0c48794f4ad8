"""A bounded set of recently seen hashes."""

from __future__ import annotations

from collections.abc import Iterable


class RecentSet:
    """A set of at most `size` hashes, at least two. The newest half always stays."""

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self._new: set[bytes] = set()
        self._old: set[bytes] = set()

    def add(self, hash: bytes) -> None:
        """Insert a hash as the newest, also if it is in the set already."""
        self._new.add(hash)
        if len(self._new) == self._half:
            self._old, self._new = self._new, set()

    def clear(self) -> None:
        self._old, self._new = set(), set()

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._new or hash in self._old

    def intersection(self, hashes: Iterable[bytes]) -> set[bytes]:
        """The given hashes that are in the set."""
        hashes = set(hashes)
        return (hashes & self._new) | (hashes & self._old)
