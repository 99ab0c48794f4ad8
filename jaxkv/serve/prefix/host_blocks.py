"""Blocks that were moved to the host's memory and return when a request needs them."""

from __future__ import annotations

from jaxkv.serve.prefix.lease import Block
from jaxkv.serve.prefix.owners import Shares
from jaxkv.serve.prefix.tier import Tier, Transfer


class HostBlocks:
    """The pages of the host's memory.

    transfers: copies still to be done, in order. The tail of a prefix arrives first and leaves
    first, so every block here has all its ancestors.
    """

    def __init__(self, pages: int, shares: Shares) -> None:
        self.transfers: list[Transfer] = []
        self._tier: Tier[Block] = Tier("host", pages, shares)

    @property
    def taken(self) -> int:
        return self._tier.taken

    def demote(self, block: Block) -> Block | None:
        """Move a block from the device to the host.

        Returns the block that is lost, which may be the given one, or None.
        """
        page, lost = self._tier.take(), None
        if page is None:
            lost = self._tier.used.oldest(block.owner)
            if lost is None:
                return block
            self.remove(lost)
            page = self._tier.take()
        self.transfers.append(Transfer("device", block.page, "host", page))
        block.page, block.on_host = page, True
        self._tier.used.add(block)
        return lost

    def hold(self, block: Block) -> None:
        """Protect a block from eviction until `promote`."""
        self._tier.used.remove(block)

    def promote(self, block: Block, page: int) -> None:
        """Move a held block to a page of the device."""
        self.transfers.append(Transfer("host", block.page, "device", page))
        self._tier.give_back(block.page)
        block.page, block.on_host = page, False

    def remove(self, block: Block) -> None:
        """Remove a block and free its page."""
        self._tier.used.remove(block)
        self._tier.give_back(block.page)
        block.on_host = False

    def clear(self) -> None:
        for block in list(self._tier.used):
            self.remove(block)
        self.transfers.clear()
