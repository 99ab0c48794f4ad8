"""A pool of equal blocks that requests with a common prefix share.

The pool touches no device: pages are numbers, and `transfers` lists the copies to do before
anything is written. allocator.py manages the pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from jaxkv.errors import UserError, check_choice, check_int
from jaxkv.serve.prefix.allocator import PageAllocator
from jaxkv.serve.prefix.block_hash import (
    TOKEN,
    BlockHasher,
    Hash,
    HashedPrompt,
    TokenIds,
    encode,
    sha256,
)
from jaxkv.serve.prefix.counts import Counts
from jaxkv.serve.prefix.eviction import ORDERS
from jaxkv.serve.prefix.index import BlockIndex
from jaxkv.serve.prefix.lease import Block, Copy, Lease, Match, leading_on_device

MODES = ("alias", "rekey", "full")


class BlockPool:
    """Blocks of prompts, found by the hash of all tokens up to their end.

    block_size: tokens in a block.
    num_blocks: pages; None for as many as are requested.
    capacity: maximum number of unused blocks that stay cached (the report's K); None for no limit.
    mode: how a prompt's partial last block is found. `full`: not at all. `alias`: by the prompt's
      tokens, and a reader copies it. `rekey` (the report): by its current tokens, so no longer by
      the prompt once a token was appended.
    order: eviction order, see eviction.py.
    hashing, hash: see block_hash.py.
    cap: leave at least the last token of a prompt to compute, because its logits are needed.
    clock: returns the time of a release; by default a counter.
    ghosts: evicted hashes that are remembered to explain misses.
    host_blocks: pages in the host's memory for evicted blocks; the least recently evicted block is
      lost first.
    Raises UserError for an unknown mode, order or hashing, for sizes below 1, and for host_blocks
    in a mode that shares partial blocks.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int | None = None,
        capacity: int | None = None,
        mode: str = "alias",
        order: str = "lru",
        hashing: str = "chained",
        cap: bool = True,
        clock: Callable[[], int] | None = None,
        ghosts: int = 2**16,
        hash: Hash = sha256,
        host_blocks: int = 0,
    ) -> None:
        check_choice("mode", mode, MODES)
        check_choice("order", order, ORDERS)
        limits = (("num_blocks", num_blocks, 1), ("capacity", capacity, 0), ("ghosts", ghosts, 2))
        for name, value, minimum in (*limits, ("host_blocks", host_blocks, 0)):
            if value is not None:
                check_int(name, value, minimum)
        if host_blocks and mode != "full":
            raise UserError(f"mode must be full with host_blocks, got {mode!r}; choose full")
        self.chain = BlockHasher(block_size, hashing, hash)
        self.block_size, self.capacity, self.mode, self.cap = block_size, capacity, mode, cap
        self.counts = Counts()
        self._index = BlockIndex(block_size, mode == "alias", ghosts)
        self._pages = PageAllocator(
            num_blocks, capacity, order, host_blocks, clock, self.counts, self._index.forget
        )
        self.transfers = self._pages.host.transfers

    @property
    def num_blocks(self) -> int:
        """All pages; in an unbounded pool, the pages that were used so far."""
        return self._pages.made

    @property
    def free(self) -> int:
        return len(self._pages.free)

    @property
    def cached(self) -> int:
        return len(self._pages.cached)

    @property
    def active(self) -> int:
        return self._pages.active

    @property
    def host_taken(self) -> int:
        return self._pages.host.taken

    @property
    def entries(self) -> int:
        """The hashes in the index."""
        return len(self._index)

    def hash_prompt(self, tokens: TokenIds, root: bytes, owner: str | None = None) -> HashedPrompt:
        """Hash a prompt for `match` and `admit`. Raises UserError for no or invalid tokens.

        owner: who has its blocks; owners have equal shares of the pages (owners.py).
        """
        return self.chain.hash_prompt(tokens, root, self.mode != "full", owner)

    def get(self, hash: bytes) -> Block | None:
        """The published block of this hash, on the device or the host."""
        return self._index.get(hash)

    def match(self, prompt: HashedPrompt) -> Match:
        """Look a prompt up without changing or counting anything."""
        cached_blocks, collided = self._index.walk(prompt)
        matched, usable = self._extent(prompt, cached_blocks)
        pages = [block.page for block in leading_on_device(cached_blocks)]
        missed = self._index.missed(prompt, len(cached_blocks), usable, collided)
        return Match(pages, matched, usable, missed)

    def admit(
        self,
        prompt: HashedPrompt,
        extra_tokens: int = 0,
        partly: bool = False,
        restore: Callable[[HashedPrompt, int, int], bool] | None = None,
    ) -> Lease | None:
        """Take cached and new blocks for a prompt; returns None, uncounted, if too few are left.

        extra_tokens: tokens that will be appended; their blocks are taken now. partly: take as
        many of the prompt's first blocks as possible, never None; such a lease cannot be appended
        to. restore: fills the page of a block from elsewhere: prompt, number of the block, page ->
        whether it did. It needs mode `full`. Do the `transfers` before reading or writing.
        """
        self._pages.shares.touch(prompt.owner)
        cached_blocks, collided = self._index.walk(prompt)
        size = len(prompt)
        blocks = -(-(size + extra_tokens) // self.block_size)
        if partly:
            blocks = self._pages.max_blocks(blocks, cached_blocks, prompt.owner)
            del cached_blocks[blocks:]
        while True:
            usable = self._extent(prompt, cached_blocks)[1]
            full, tail = divmod(usable, self.block_size)
            # The report shares a tail too; the first request that writes to it takes a copy.
            if tail and self.mode == "rekey" and usable == size:
                full, tail = full + 1, 0
            donor = cached_blocks[full] if tail else None
            on_host = sum(block.on_host for block in cached_blocks[:full])
            if self._pages.can_take(blocks - full + on_host, cached_blocks[:full], donor):
                break
            if partly and blocks:  # the last block found may have to be recomputed in a new page
                blocks -= 1
                del cached_blocks[blocks:]
            elif donor is None or donor.refs:
                return None
            else:
                del cached_blocks[full:]  # its page is needed
        missed = self._index.missed(prompt, len(cached_blocks), usable, collided)
        shared = cached_blocks[:full]
        self._pages.share(shared)
        lease = Lease(
            prompt, shared, size, usable, bytearray(prompt.data), list(prompt.hashes),
            published=min(full, size // self.block_size),
        )  # fmt: skip
        self._extend(lease, blocks, donor, tail)
        self._pages.leased[prompt.owner] += len(lease.blocks)
        if restore is not None and not collided and (restored := self._restored(lease, restore)):
            missed = self._index.missed(prompt, full + restored, lease.cached, False)
        self.counts.lookups.add(size, lease.cached, self.block_size, missed)
        return lease

    def _restored(self, lease: Lease, restore: Callable[[HashedPrompt, int, int], bool]) -> int:
        """Restore blocks after the cached ones, and publish them; returns their number."""
        first = lease.cached // self.block_size
        for number in range(first, (len(lease.prompt) - self.cap) // self.block_size):
            if number == len(lease.blocks) and not self.extend(lease):
                break
            if not restore(lease.prompt, number, lease.blocks[number].page):
                break
            self._publish_full(lease, number + 1)
            lease.cached += self.block_size
        return lease.cached // self.block_size - first

    def publish(self, lease: Lease, computed: int | None = None) -> None:
        """Let lookups find the blocks of the first `computed` tokens of a lease; None: all.

        If another request published an equal block first, the lease switches to that block and
        frees its own: `lease.pages` may change. Raises RuntimeError for a released lease.
        """
        self._check_held(lease)
        size = len(lease.prompt)
        computed = lease.length if computed is None else min(computed, lease.length)
        if self.mode == "alias" and computed >= size and not lease.tail_published:
            lease.tail_published = True
            self._publish_full(lease, size // self.block_size)
            self._publish_tail(lease, size)
        self._publish_full(lease, computed // self.block_size)
        if self.mode == "rekey":
            self._publish_tail(lease, computed)

    def append(self, lease: Lease, token: int) -> bool:
        """Add one token to a lease; returns False if no page is free or can be evicted.

        After `lease.copies`, write it to slot (length - 1) % block_size of the last page in use.
        Raises RuntimeError for a released lease.
        """
        self._check_held(lease)
        number, offset = divmod(lease.length, self.block_size)
        blocks = lease.blocks
        if number == len(blocks):
            page = self._pages.take(lease.prompt.owner)
            if page is None:
                return False
            self._add(lease, page)
        elif offset and blocks[number].refs > 1 and self.mode == "rekey":
            page = self._pages.take(lease.prompt.owner)
            if page is None:
                return False
            shared = blocks[number]
            blocks[number] = Block(page, number, owner=lease.prompt.owner)
            shared.refs -= 1
            lease.copies.append(Copy(shared.page, page, offset))
        lease.data += encode((token,))
        lease.length += 1
        return True

    def extend(self, lease: Lease) -> bool:
        """Add an empty block to a lease; returns False if its owner can get no page.

        Do the `transfers` before writing to it.
        """
        self._check_held(lease)
        if not self._pages.max_blocks(1, [], lease.prompt.owner):
            return False
        self._add(lease, self._pages.take(lease.prompt.owner))
        return True

    def _add(self, lease: Lease, page: int) -> None:
        lease.blocks.append(Block(page, len(lease.blocks), owner=lease.prompt.owner))
        self._pages.leased[lease.prompt.owner] += 1

    def release(self, lease: Lease) -> None:
        """Release a lease; published blocks stay cached until eviction, tails leave first.

        Raises RuntimeError if it was released before.
        """
        self._check_held(lease)
        lease.released = True
        self._pages.leased -= Counter({lease.prompt.owner: len(lease.blocks)})
        self._pages.release(lease.blocks)

    def _check_held(self, lease: Lease) -> None:
        if lease.released:
            raise RuntimeError("this lease was released before")

    def reset(self) -> bool:
        """Remove all blocks, not the counts; returns False, and does nothing, if any is active."""
        if self.active:
            return False
        self._pages.clear()
        self._index.clear()
        return True

    def _extent(self, prompt: HashedPrompt, cached_blocks: list[Block]) -> tuple[int, int]:
        """The matched tokens, and those of them that need not be computed."""
        size = len(prompt)
        matched = min(len(cached_blocks) * self.block_size, size)
        usable = min(matched, size - 1) if self.cap else matched
        return matched, usable - usable % self.block_size if self.mode == "full" else usable

    def _extend(self, lease: Lease, blocks: int, donor: Block | None, tail: int) -> None:
        """Append new blocks to a table; the first starts with `tail` tokens of the donor."""
        table, take, free = lease.blocks, self._pages.take, self._pages.free
        owner = lease.prompt.owner
        if donor is not None:
            self._pages.hold(donor)
        table += [
            Block(free.pop() if free else take(owner), number, owner=owner)
            for number in range(len(table), blocks)
        ]
        if donor is not None:
            lease.copies.append(Copy(donor.page, table[donor.depth].page, tail))
            self._pages.release_one(donor)  # the lease holds its ancestors

    def _publish_full(self, lease: Lease, stop: int) -> None:
        """Publish the full blocks of a lease up to number `stop`."""
        prompt, blocks, rekey = lease.prompt, lease.blocks, self.mode == "rekey"
        insert, size = self._index.insert, self.block_size * TOKEN
        prompt_blocks = len(prompt) // self.block_size
        parent = blocks[lease.published - 1] if lease.published else prompt.root
        for number in range(lease.published, min(stop, len(blocks))):
            if number < prompt_blocks:
                hash, tokens = prompt.hashes[number], prompt.blocks[number]
            else:
                end = (number + 1) * size
                hash = self._hash(lease, number, end)
                tokens = bytes(lease.data[end - size : end])
            block = blocks[number]
            if rekey:
                self._index.remove(block)
            present = insert(block, hash, parent, tokens)
            if present is None:  # no lookup could reach the blocks after it either
                return
            if present is not block:
                self._replace(lease, number, present)
            lease.published = number + 1
            parent = present

    def _replace(self, lease: Lease, number: int, present: Block) -> None:
        """Replace one of a lease's blocks by a published block with the same content."""
        block, on_host = lease.blocks[number], present.on_host
        if on_host:  # it was evicted to the host while this one was computed: reuse this page
            self._pages.adopt(block.page, present)
        else:
            self._pages.hold(present)
        if number:  # a request uses a block no more often than its ancestors
            present.uses = min(present.uses, lease.blocks[number - 1].uses)
        lease.blocks[number] = present
        if on_host:
            return
        self.counts.duplicates += 1
        block.refs -= 1
        if not block.refs:
            self._index.redirect(block, present)
            self._pages.free.append(block.page)

    def _publish_tail(self, lease: Lease, end: int) -> None:
        """Publish the partial block in which the first `end` tokens end."""
        number, tokens = divmod(end, self.block_size)
        if not tokens or number != lease.published:  # it is full by now, or follows a collision
            return
        block, begin = lease.blocks[number], number * self.block_size * TOKEN
        hash = self._hash(lease, number, end * TOKEN)
        if hash in block.hashes:
            return
        if self.mode == "rekey":
            self._index.remove(block)
        # If another block has the same content, this one stays private.
        parent = lease.blocks[number - 1] if number else lease.prompt.root
        self._index.insert(block, hash, parent, bytes(lease.data[begin : end * TOKEN]))

    def _hash(self, lease: Lease, number: int, end: int) -> bytes:
        """The hash of block `number` of a lease with its tokens up to byte `end`."""
        hashes, block = lease.hashes, self.block_size * TOKEN
        begin = number * block
        if number < len(hashes) and end == min(begin + block, len(lease.prompt.data)):
            return hashes[number]
        parent = hashes[number - 1] if number else lease.prompt.root
        hash = self.chain.hash_block(lease.prompt.root, parent, lease.data, begin, end)
        if end - begin == block:
            hashes[number:] = [hash]
        return hash
