"""A naive index of blocks, which the tests compare with: a dict of whole prefixes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Entry:
    refs: int = 1
    time: int = 0


@dataclass
class Naive:
    """No two releases have the same time. The last token of a prompt is never cached."""

    block: int
    capacity: int | None
    entries: dict[tuple, Entry] = field(default_factory=dict)
    time: int = 0
    evictions: int = 0

    def prefixes(self, root, tokens):
        return [
            (root, *tokens[: end * self.block]) for end in range(1, len(tokens) // self.block + 1)
        ]

    def unused(self):
        """Unused prefixes in eviction order: the oldest first, of one time the longest."""
        unused = [prefix for prefix, entry in self.entries.items() if not entry.refs]
        return sorted(unused, key=lambda prefix: (self.entries[prefix].time, -len(prefix)))

    def cached(self, root, tokens):
        """The leading prefixes of a prompt that are cached and leave a token to compute."""
        cached = []
        for prefix in self.prefixes(root, tokens[:-1]):
            if prefix not in self.entries:
                break
            cached.append(prefix)
        return cached

    def hold(self, root, tokens):
        held = self.cached(root, tokens)
        for prefix in held:
            self.entries[prefix].refs += 1
        return held

    def save(self, held, root, tokens):
        """Store the next block of a prompt; returns whether it is held now."""
        prefix = self.prefixes(root, tokens)[len(held)]
        if prefix in self.entries:
            self.entries[prefix].refs += 1
        else:
            if self.capacity is not None and len(self.entries) == self.capacity:
                unused = self.unused()
                if not unused:
                    return False
                del self.entries[unused[0]]
                self.evictions += 1
            self.entries[prefix] = Entry()
        held.append(prefix)
        return True

    def release(self, held):
        self.time += 1
        for prefix in held:
            self.entries[prefix].refs -= 1
            self.entries[prefix].time = self.time
