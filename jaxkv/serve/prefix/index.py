"""The index from block hashes to blocks, and a record of recently evicted hashes."""

from __future__ import annotations

from jaxkv.serve.prefix.block_hash import HashedPrompt
from jaxkv.serve.prefix.lease import Block
from jaxkv.serve.prefix.recent import RecentSet


class BlockIndex:
    """Published blocks by hash, one block per hash.

    block_size: tokens in a block. alias: a block also matches a shorter run of its tokens. ghosts:
    evicted hashes that are remembered, the newest first.
    """

    def __init__(self, block_size: int, alias: bool, ghosts: int) -> None:
        self._block_size = block_size
        self._entries: dict[bytes, Block] = {}
        self._ghosts = RecentSet(ghosts)
        # Written tokens never change, so a block whose first tokens are equal is valid.
        self._same = bytes.startswith if alias else bytes.__eq__

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, hash: bytes) -> Block | None:
        return self._entries.get(hash)

    def walk(self, prompt: HashedPrompt) -> tuple[list[Block], bool]:
        """The blocks that hold a prompt's beginning, and whether a hash collision ended them."""
        entries, equal = self._entries, self._same
        blocks: list[Block] = []
        parent: Block | bytes = prompt.root
        for hash, tokens in zip(prompt.hashes, prompt.blocks, strict=True):
            block = entries.get(hash)
            if block is None:
                return blocks, False
            if block.parent != parent or not equal(block.tokens, tokens):
                return blocks, True
            blocks.append(block)
            parent = block
        return blocks, False

    def missed(
        self, prompt: HashedPrompt, num_blocks: int, usable: int, collided: bool
    ) -> dict[str, int]:
        """The missed tokens by reason, without reasons that have none.

        num_blocks: how many `walk` returned. usable: their tokens that will be used.
        """
        size, block, hashes = len(prompt), self._block_size, prompt.hashes
        at, end = min(num_blocks * block, size), min(len(hashes) * block, size)
        missed = {"last_token": at - usable} if at > usable else {}
        if end < size:
            missed["tail"] = size - end
        if collided:
            missed["collision"] = end - at
        elif at < end:
            gone, entries = self._ghosts.intersection(hashes[num_blocks:]), self._entries
            # A block that is still in the index comes after one that was evicted.
            numbers = [
                n
                for n in range(num_blocks, len(hashes))
                if hashes[n] in gone or hashes[n] in entries
            ]
            evicted = sum(min(block, size - n * block) for n in numbers)
            if evicted:
                missed["evicted"] = evicted
            if evicted < end - at:
                missed["cold"] = end - at - evicted
        return missed

    def insert(
        self, block: Block, hash: bytes, parent: Block | bytes, tokens: bytes
    ) -> Block | None:
        """Publish a block; returns the block that has this hash: this one, or an equal earlier one.

        Returns None if the earlier block has other content; it stays.
        """
        present = self._entries.get(hash)
        if present is None:
            self._entries[hash] = present = block
            block.hashes = (*block.hashes, hash) if block.hashes else (hash,)
        elif present is not block:
            equal = present.parent == parent and self._same(present.tokens, tokens)
            return present if equal else None
        block.parent, block.tokens = parent, tokens
        if isinstance(parent, Block):  # so that no owner's eviction takes a parent before its child
            block.owner = parent.owner
        return present

    def remove(self, block: Block) -> None:
        """Unpublish a block whose content changes."""
        for hash in block.hashes:
            del self._entries[hash]
        block.hashes = ()

    def forget(self, block: Block) -> None:
        """Unpublish an evicted block and remember its hashes."""
        for hash in block.hashes:
            del self._entries[hash]
            self._ghosts.add(hash)
        block.hashes = ()

    def redirect(self, block: Block, target: Block) -> None:
        """Give all hashes of a block to another block with the same content or more."""
        for hash in block.hashes:
            self._entries[hash] = target
        target.hashes = (*target.hashes, *block.hashes)
        block.hashes = ()

    def clear(self) -> None:
        self._entries.clear()
        self._ghosts.clear()
