"""Blocks that went to the memory of the host, and come back once they are asked for."""

from __future__ import annotations

from jaxkv.prefix.lease import Block
from jaxkv.prefix.tier import Move, Tier


class HostPages:
    """Pages of the host's memory. moves: what is to be copied, in turn, and was not yet.

    Of a prefix the tail comes first and leaves first, so no block is here without those before it.
    """

    def __init__(self, pages: int) -> None:
        self.moves: list[Move] = []
        self._tier: Tier[Block] = Tier("host", pages)

    @property
    def taken(self) -> int:
        return self._tier.taken

    def put(self, block: Block) -> Block | None:
        """Take in a block of the device; the one that is lost for it, which may be itself."""
        slot, lost = self._tier.take(), None
        if slot is None:
            lost = self._tier.oldest()
            if lost is None:
                return block
            self.remove(lost)
            slot = self._tier.take()
        self.moves.append(Move("device", block.page, "host", slot))
        block.page, block.on_host = slot, True
        self._tier.used[block] = None
        return lost

    def hold(self, block: Block) -> None:
        """Keep a block from being lost until `bring`."""
        del self._tier.used[block]

    def bring(self, block: Block, page: int) -> None:
        """Give a block that was held to a page of the device."""
        self.moves.append(Move("host", block.page, "device", page))
        self._tier.give(block.page)
        block.page, block.on_host = page, False

    def remove(self, block: Block) -> None:
        """Have a block no more."""
        del self._tier.used[block]
        self._tier.give(block.page)
        block.on_host = False

    def clear(self) -> None:
        for block in list(self._tier.used):
            self.remove(block)
        self.moves.clear()
