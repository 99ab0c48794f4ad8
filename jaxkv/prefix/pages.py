"""Pages of a pool, and what becomes of the blocks in them.

A page is free, active (it stands in a table) or cached (findable, and in no table). What is cached
is taken when a page is needed and none is free, in the order that was chosen; it may go on to a
page of the host, and come back once it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count

from jaxkv.prefix.counts import Counts
from jaxkv.prefix.host import HostPages
from jaxkv.prefix.lease import Block, near
from jaxkv.prefix.orders import ORDERS, Order


class Pages:
    """Pages by number; the arguments that are not told here are BlockPool's.

    counts: of what comes and goes. forget: is told of a block that is nowhere any more. free: pages
    with nothing in them. cached: blocks that nobody uses. host: pages of the host's memory.
    """

    def __init__(
        self,
        total: int | None,
        capacity: int | None,
        order: str,
        host: int,
        clock: Callable[[], int] | None,
        counts: Counts,
        forget: Callable[[Block], None],
    ) -> None:
        self.free = [] if total is None else list(reversed(range(total)))
        self.made = total or 0
        self.cached: Order = ORDERS[order]()
        self.host = HostPages(host)
        self._endless, self._capacity, self._order = total is None, capacity, order
        self._clock = clock or count().__next__
        self._counts, self._forget = counts, forget

    @property
    def active(self) -> int:
        return self.made - len(self.free) - len(self.cached)

    def most(self, wanted: int, found: list[Block]) -> int:
        """How many of the blocks that a prompt wants it can have, where these of it are there."""
        if self._endless:
            return wanted
        usable = near(found)
        own = sum(not block.refs for block in usable)
        return min(wanted, len(usable) + len(self.free) + len(self.cached) - own)

    def suffice(self, new: int, shared: list[Block], donor: Block | None) -> bool:
        """Whether so many new blocks can be had without those that are to be shared or copied."""
        if self._endless or new <= len(self.free):
            return True
        kept = sum(not block.refs and not block.on_host for block in shared)
        kept += donor is not None and not donor.refs
        return new <= len(self.free) + len(self.cached) - kept

    def take(self) -> int | None:
        """A page for something new; None where none is free or can be evicted."""
        if self.free:
            return self.free.pop()
        if self._endless:
            self.made += 1
            return self.made - 1
        return self.evict() if len(self.cached) else None

    def evict(self) -> int:
        """The page of the block whose turn it is."""
        block = self.cached.pop()
        page = block.page
        lost = self.host.put(block)
        self._counts.demotions += lost is not block
        if lost is not None:
            self._forget(lost)
            self._counts.evictions += 1
        return page

    def hold(self, block: Block) -> None:
        """Use a block once more."""
        if block.on_host:
            self.host.hold(block)
        elif not block.refs:
            self.cached.remove(block)
        block.refs += 1
        block.uses += 1

    def share(self, found: list[Block]) -> None:
        """Hold blocks, on the device from now on."""
        for block in found:
            self.hold(block)
        for block in found:
            if block.on_host:
                self.host.bring(block, self.take())
                self._counts.promotions += 1

    def leave(self, blocks: Sequence[Block]) -> None:
        """Use blocks of a table no more; those that are findable stay until they are evicted."""
        time, cached, free = self._clock(), self.cached, self.free
        room = math.inf if self._capacity is None else self._capacity - len(cached)
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs:
                continue
            if not block.keys:
                free.append(block.page)
                continue
            # First in, then one out: the other way round a chain would lose its middle.
            cached.add(block, time, block.depth, block.uses)
            room -= 1
            if room < 0:
                free.append(self.evict())
                room = 0

    def put_back(self, block: Block) -> None:
        """Use a block no more that was held for a moment, and is findable."""
        block.refs -= 1
        if not block.refs:
            self.cached.add(block, self._clock(), block.depth, block.uses)

    def return_to(self, page: int, block: Block) -> None:
        """Use a block of the host in a page that holds the same already."""
        self.host.remove(block)
        block.page, block.refs, block.uses = page, 1, block.uses + 1

    def drop(self, block: Block) -> None:
        """Have nothing of a block that is found no more, once nobody uses it."""
        if block.on_host:
            self.host.remove(block)
        elif not block.refs:
            self.cached.remove(block)
            self.free.append(block.page)

    def clear(self) -> None:
        """Have nothing of what nobody uses."""
        self.free += [block.page for block in self.cached]
        self.cached = ORDERS[self._order]()
        self.host.clear()
