"""The page allocator of a block pool.

A page is free, active (in a block table) or cached (found by lookups, in no table). When a page is
needed and none is free, the next cached block in eviction order gives up its page. An evicted block
may move to the host's memory and return on its next use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from jaxkv.serve.prefix.counts import Counts
from jaxkv.serve.prefix.host_blocks import HostBlocks
from jaxkv.serve.prefix.lease import Block, leading_on_device
from jaxkv.serve.prefix.owners import FairOrder, Owner, Shares


class PageAllocator:
    """Pages by number. `num_blocks`, `capacity`, `order`, `host_blocks`, `clock`: as in BlockPool.

    counts: receives evictions, demotions and promotions. forget: called with each block that is
    lost. free: empty pages. cached: blocks without users. leased: the pages of each owner's block
    tables, without a table that is being made. host: the pages in the host's memory.
    """

    def __init__(
        self,
        num_blocks: int | None,
        capacity: int | None,
        order: str,
        host_blocks: int,
        clock: Callable[[], int] | None,
        counts: Counts,
        forget: Callable[[Block], None],
    ) -> None:
        self.free = [] if num_blocks is None else list(reversed(range(num_blocks)))
        self.made = num_blocks or 0
        self.shares = Shares()
        self.cached = FairOrder(order, self.shares)
        self.host = HostBlocks(host_blocks, self.shares)
        self._unbounded, self._capacity, self._order = num_blocks is None, capacity, order
        self.leased: Counter[Owner] = Counter()
        self._clock = clock or count().__next__
        self._counts, self._forget = counts, forget

    @property
    def active(self) -> int:
        return self.made - len(self.free) - len(self.cached)

    def held(self, owner: Owner) -> int:
        """Active pages that count for an owner, as a table that is being made is its own."""
        foreign = sum(pages for holder, pages in self.leased.items() if holder != owner)
        return max(0, self.active - foreign)

    def max_blocks(self, limit: int, matched: list[Block], owner: Owner) -> int:
        """The most blocks, up to `limit`, that a prompt can get if `matched` are cached.

        A prompt gets no page within the share of another owner.
        """
        if self._unbounded:
            return limit
        usable = leading_on_device(matched)
        idle = sum(not block.refs for block in usable)
        free = len(self.free)
        evictable = self.cached.available(owner, self.held(owner) + free, limit)
        return min(limit, max(0, len(usable) + free + evictable - idle))

    def can_take(self, new: int, shared: list[Block], donor: Block | None) -> bool:
        """Whether `new` pages are available without evicting a shared block or the donor."""
        if self._unbounded or new <= len(self.free):
            return True
        protected = sum(not block.refs and not block.on_host for block in shared)
        protected += donor is not None and not donor.refs
        return new <= len(self.free) + len(self.cached) - protected

    def take(self, owner: Owner) -> int | None:
        """An empty page for an owner; None if no page is free and none can be evicted."""
        if self.free:
            return self.free.pop()
        if self._unbounded:
            self.made += 1
            return self.made - 1
        return self.evict(owner) if len(self.cached) else None

    def evict(self, owner: Owner = None) -> int:
        """Evict the next block and return its page. owner: who needs it."""
        block = self.cached.pop(owner, self.held(owner))
        page = block.page
        lost = self.host.demote(block)
        self._counts.demotions += lost is not block
        if lost is not None:
            self._forget(lost)
            self._counts.evictions += 1
        return page

    def hold(self, block: Block) -> None:
        """Add one user to a block."""
        if block.on_host:
            self.host.hold(block)
        elif not block.refs:
            self.cached.remove(block)
        block.refs += 1
        block.uses += 1

    def share(self, blocks: list[Block]) -> None:
        """Add one user to each block, and move those on the host to the device."""
        for block in blocks:
            self.hold(block)
        for block in blocks:
            if block.on_host:
                self.host.promote(block, self.take(block.owner))
                self._counts.promotions += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Remove one user from each block of a table; published blocks stay until eviction."""
        time, cached, free = self._clock(), self.cached, self.free
        room = math.inf if self._capacity is None else self._capacity - len(cached)
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs:
                continue
            if not block.hashes:
                free.append(block.page)
                continue
            # Insert first, then evict one: the other order would cut a chain in two.
            cached.add(block, time, block.depth, block.uses)
            room -= 1
            if room < 0:
                free.append(self.evict(block.owner))
                room = 0

    def release_one(self, block: Block) -> None:
        """Remove the user of a published block that was held for a moment."""
        block.refs -= 1
        if not block.refs:
            self.cached.add(block, self._clock(), block.depth, block.uses)

    def adopt(self, page: int, block: Block) -> None:
        """Use a block of the host in a device page that already has the same content."""
        self.host.remove(block)
        block.page, block.refs, block.uses = page, 1, block.uses + 1

    def clear(self) -> None:
        """Free the pages of all blocks without users."""
        self.free += [block.page for block in self.cached]
        self.cached = FairOrder(self._order, self.shares)
        self.host.clear()
