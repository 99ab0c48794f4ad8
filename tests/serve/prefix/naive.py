"""A naive pool, which the tests compare with: a dict of whole prefixes, searched linearly."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Entry:
    refs: int = 1
    uses: int = 1
    time: int = 0


@dataclass
class Table:
    tokens: list[int]
    prefixes: list[tuple | None]  # None: a block that no lookup finds


@dataclass
class Naive:
    """It caches only full blocks. No two releases have the same time."""

    block: int
    num_blocks: int | None
    capacity: int | None
    cap: bool
    lfu: bool
    entries: dict[tuple, Entry] = field(default_factory=dict)
    private: int = 0
    time: int = 0
    evictions: int = 0

    def prefixes(self, root, tokens):
        return [
            (root, *tokens[: end * self.block]) for end in range(1, len(tokens) // self.block + 1)
        ]

    def cached(self):
        """Unused prefixes in eviction order."""
        unused = [prefix for prefix, entry in self.entries.items() if not entry.refs]
        return sorted(unused, key=self.rank)

    def rank(self, prefix):
        entry = self.entries[prefix]
        return (entry.uses if self.lfu else 0, entry.time, -len(prefix))

    def usable(self, root, tokens):
        matched = 0
        for prefix in self.prefixes(root, tokens):
            if prefix not in self.entries:
                break
            matched += self.block
        if self.cap:
            matched = min(matched, len(tokens) - 1)
        return matched // self.block * self.block

    def admit(self, root, tokens, room):
        shared = self.prefixes(root, tokens)[: self.usable(root, tokens) // self.block]
        new = -(-(len(tokens) + room) // self.block) - len(shared)
        if not self.make_room(new, shared):
            return None
        for prefix in shared:
            self.add_reference(prefix)
        self.private += new
        return Table(list(tokens), [*shared, *[None] * new])

    def make_room(self, new, shared=()):
        """Make `new` pages available by eviction; False, without evicting, if too few can be."""
        if self.num_blocks is None:
            return True
        free = self.num_blocks - self.private - len(self.entries)
        evictable = [prefix for prefix in self.cached() if prefix not in shared]
        if new > free + len(evictable):
            return False
        for prefix in evictable[: max(new - free, 0)]:
            self.evict(prefix)
        return True

    def evict(self, prefix):
        del self.entries[prefix]
        self.evictions += 1

    def add_reference(self, prefix):
        self.entries[prefix].refs += 1
        self.entries[prefix].uses += 1

    def publish(self, root, table, computed):
        for number, prefix in enumerate(self.prefixes(root, table.tokens[:computed])):
            if table.prefixes[number] is not None:
                continue
            table.prefixes[number] = prefix
            self.private -= 1
            if prefix in self.entries:
                self.add_reference(prefix)
                if number:
                    parent = self.entries[table.prefixes[number - 1]]
                    self.entries[prefix].uses = min(self.entries[prefix].uses, parent.uses)
            else:
                self.entries[prefix] = Entry()

    def append(self, table, token):
        if len(table.tokens) == len(table.prefixes) * self.block:
            if not self.make_room(1):
                return False
            self.private += 1
            table.prefixes.append(None)
        table.tokens.append(token)
        return True

    def release(self, table):
        self.time += 1
        for prefix in reversed(table.prefixes):
            if prefix is None:
                self.private -= 1
                continue
            entry = self.entries[prefix]
            entry.refs -= 1
            entry.time = self.time
        while self.capacity is not None and len(self.cached()) > self.capacity:
            self.evict(self.cached()[0])
