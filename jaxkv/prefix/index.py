"""Blocks by the keys of what they hold, and what is remembered of those that are gone."""

from __future__ import annotations

from jaxkv.prefix.keys import Prompt
from jaxkv.prefix.lease import Block
from jaxkv.prefix.recent import Recent


class Index:
    """What can be found, one block a key.

    block: tokens in one. alias: a block is also found by fewer tokens than it has. ghosts: keys
    of forgotten blocks that are remembered, the newest.
    """

    def __init__(self, block: int, alias: bool, ghosts: int) -> None:
        self._block = block
        self._entries: dict[bytes, Block] = {}
        self._ghosts = Recent(ghosts)
        # Rows do not change once they are written, so a block that begins right will do.
        self._same = bytes.startswith if alias else bytes.__eq__

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Block | None:
        return self._entries.get(key)

    def walk(self, prompt: Prompt) -> tuple[list[Block], bool]:
        """The blocks that hold a prompt's beginning; whether another prefix ended the walk."""
        entries, same = self._entries, self._same
        found: list[Block] = []
        parent: Block | bytes = prompt.root
        for key, tokens in zip(prompt.keys, prompt.pieces, strict=True):
            block = entries.get(key)
            if block is None:
                return found, False
            if block.parent != parent or not same(block.tokens, tokens):
                return found, True
            found.append(block)
            parent = block
        return found, False

    def missed(self, prompt: Prompt, found: int, usable: int, collided: bool) -> dict[str, int]:
        """Tokens by the reason why they are missed, only reasons that there are.

        found: blocks that `walk` gave. usable: tokens of them that will be used.
        """
        size, block, keys = len(prompt), self._block, prompt.keys
        at, end = min(found * block, size), min(len(keys) * block, size)
        missed = {"last_token": at - usable} if at > usable else {}
        if end < size:
            missed["tail"] = size - end
        if collided:
            missed["collision"] = end - at
        elif at < end:
            gone, entries = self._ghosts.among(keys[found:]), self._entries
            # What is still in the index lay behind something that was evicted.
            numbers = [n for n in range(found, len(keys)) if keys[n] in gone or keys[n] in entries]
            evicted = sum(min(block, size - n * block) for n in numbers)
            if evicted:
                missed["evicted"] = evicted
            if evicted < end - at:
                missed["cold"] = end - at - evicted
        return missed

    def enter(self, block: Block, key: bytes, parent: Block | bytes, tokens: bytes) -> Block | None:
        """The block that is found by this key from now on: this one, or the first that had it.

        None where that one holds something else, which then stays.
        """
        held = self._entries.get(key)
        if held is None:
            self._entries[key] = held = block
            block.keys = (*block.keys, key) if block.keys else (key,)
        elif held is not block:
            return held if held.parent == parent and self._same(held.tokens, tokens) else None
        block.parent, block.tokens = parent, tokens
        return held

    def remove(self, block: Block) -> None:
        """Find a block no more; something else is in it."""
        for key in block.keys:
            del self._entries[key]
        block.keys = ()

    def forget(self, block: Block) -> None:
        """Find a block no more, and remember that it was there."""
        for key in block.keys:
            del self._entries[key]
            self._ghosts.add(key)
        block.keys = ()

    def move(self, block: Block, other: Block) -> None:
        """Find another block, which holds the same or more, where this one was found."""
        for key in block.keys:
            self._entries[key] = other
        other.keys = (*other.keys, *block.keys)
        block.keys = ()

    def clear(self) -> None:
        self._entries.clear()
        self._ghosts.clear()
