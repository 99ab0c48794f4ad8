"""A pool of equal blocks that requests with one beginning share.

Nothing here touches a device: pages are numbers, and `moves` says what to copy before anything is
written. What becomes of them is in pages.py.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxkv.errors import UserError, one_of, whole
from jaxkv.prefix.counts import Counts
from jaxkv.prefix.index import Index
from jaxkv.prefix.keys import TOKEN, Chain, Hash, Prompt, Tokens, encode, sha256
from jaxkv.prefix.lease import Block, Copy, Lease, Match, near
from jaxkv.prefix.orders import ORDERS
from jaxkv.prefix.pages import Pages

MODES = ("alias", "rekey", "full")


class BlockPool:
    """Blocks by what leads to them.

    block: tokens in one. total: pages, None for as many as are asked for. capacity: most blocks
    that stay when nobody uses them (the report's K), None for as many as there are pages. mode:
    what of a prompt's tail is found: `full` nothing; `alias` its tokens as they stood in the
    prompt, of which a reader takes a copy; `rekey` (the report) what it holds by now, so the
    prompt's own no more once a token was written. order: of eviction, in orders.py. hashing,
    hash: of keys, in keys.py. cap: leave at least a prompt's last token to be computed, as whoever
    wants its logits must. clock: tells the time of a release, another one each time unless given.
    ghosts: keys of what was evicted that are remembered, to tell why something was missed. host:
    pages of the host's memory, behind the others; the least recently evicted leaves them first.
    Raises UserError for a mode, order or hashing that does not exist, sizes below 1, and pages of
    the host in a mode that shares parts of a block.
    """

    def __init__(
        self,
        block: int,
        total: int | None = None,
        capacity: int | None = None,
        mode: str = "alias",
        order: str = "linked",
        hashing: str = "chained",
        cap: bool = True,
        clock: Callable[[], int] | None = None,
        ghosts: int = 2**16,
        hash: Hash = sha256,
        host: int = 0,
    ) -> None:
        one_of("mode", mode, MODES)
        one_of("order", order, ORDERS)
        least = (("total", total, 1), ("capacity", capacity, 0), ("ghosts", ghosts, 2))
        for name, value, at_least in (*least, ("host", host, 0)):
            if value is not None:
                whole(name, value, at_least)
        if host and mode != "full":
            raise UserError(f"mode must be full for pages of the host, got {mode!r}; choose it")
        self.chain = Chain(block, hashing, hash)
        self.block, self.capacity, self.mode, self.cap = block, capacity, mode, cap
        self.counts = Counts()
        self._index = Index(block, mode == "alias", ghosts)
        forget = self._index.forget
        self._pages = Pages(total, capacity, order, host, clock, self.counts, forget)
        self.moves = self._pages.host.moves

    @property
    def total(self) -> int:
        """Pages there are; where there is no end of them, those that were used yet."""
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
        """Keys by which something can be found."""
        return len(self._index)

    def read(self, tokens: Tokens, root: bytes) -> Prompt:
        """A prompt with its keys, for `match`, `admit` and `pin`."""
        return self.chain.read(tokens, root, partial=self.mode != "full")

    def match(self, prompt: Prompt) -> Match:
        """What is there of a prompt; nothing is changed or counted."""
        found, collided = self._index.walk(prompt)
        matched, usable = self._extent(prompt, found)
        pages = [block.page for block in near(found)]
        missed = self._index.missed(prompt, len(found), usable, collided)
        return Match(pages, matched, usable, missed)

    def admit(
        self, prompt: Prompt, room: int = 0, resumed: bool = False, partly: bool = False
    ) -> Lease | None:
        """Take blocks for a prompt, those that are there and new ones; None where too few are.

        room: tokens that will be appended, for which blocks are taken now. resumed: admitted
        before; its figures are counted apart. partly: as many of its first blocks as can be had, to
        which nothing can be appended; never None. None counts nothing. Mind `moves` before reading
        or writing.
        """
        found, collided = self._index.walk(prompt)
        size = len(prompt)
        blocks = -(-(size + room) // self.block)
        if partly:
            blocks = self._pages.most(blocks, found)
            del found[blocks:]
        while True:
            usable = self._extent(prompt, found)[1]
            full, rows = divmod(usable, self.block)
            # The report shares a tail too, and whoever writes to it first takes a copy.
            if rows and self.mode == "rekey" and usable == size:
                full, rows = full + 1, 0
            donor = found[full] if rows else None
            far = sum(block.on_host for block in found[:full])
            if self._pages.suffice(blocks - full + far, found[:full], donor):
                break
            if partly and blocks:  # the last one found may be one that must be computed anew
                blocks -= 1
                del found[blocks:]
            elif donor is None or donor.refs:
                return None
            else:
                del found[full:]  # its page is needed
        missed = self._index.missed(prompt, len(found), usable, collided)
        counts = self.counts.resumed if resumed else self.counts.first
        counts.add(size, usable, self.block, missed)
        shared = found[:full]
        self._pages.share(shared)
        lease = Lease(
            prompt, shared, size, usable, bytearray(prompt.data), list(prompt.keys),
            published=min(full, size // self.block),
        )  # fmt: skip
        self._extend(lease, blocks, donor, rows)
        return lease

    def publish(self, lease: Lease, computed: int | None = None) -> None:
        """Make findable what the first `computed` tokens of a lease fill; None: all of them.

        Where another request published a full block first, the lease goes on with that one and
        its own is free: `lease.pages` may have changed. Raises RuntimeError where it was given
        back.
        """
        self._check_held(lease)
        size = len(lease.prompt)
        computed = lease.length if computed is None else min(computed, lease.length)
        if self.mode == "alias" and computed >= size and not lease.tail_published:
            lease.tail_published = True
            self._publish_full(lease, size // self.block)
            self._publish_part(lease, size)
        self._publish_full(lease, computed // self.block)
        if self.mode == "rekey":
            self._publish_part(lease, computed)

    def append(self, lease: Lease, token: int) -> bool:
        """Make room for one more token; False where no page is free or can be evicted.

        It goes to row (length - 1) % block of the last page in use, after `lease.copies`. Raises
        RuntimeError where the lease was given back.
        """
        self._check_held(lease)
        number, rows = divmod(lease.length, self.block)
        blocks = lease.blocks
        if number == len(blocks):
            page = self._pages.take()
            if page is None:
                return False
            blocks.append(Block(page, number))
        elif rows and blocks[number].refs > 1 and self.mode == "rekey":
            page = self._pages.take()
            if page is None:
                return False
            shared, blocks[number] = blocks[number], Block(page, number)
            shared.refs -= 1
            lease.copies.append(Copy(shared.page, page, rows))
        lease.data += encode((token,))
        lease.length += 1
        return True

    def release(self, lease: Lease) -> None:
        """Give a lease back: what is findable stays until it is evicted, tails go first.

        Raises RuntimeError where it was given back before.
        """
        self._check_held(lease)
        lease.released = True
        self._pages.leave(lease.blocks)

    def _check_held(self, lease: Lease) -> None:
        if lease.released:
            raise RuntimeError("this lease was released before")

    def pin(self, prompt: Prompt) -> Lease:
        """Hold what is there of a prompt, so that it is not evicted, until `release`.

        It is on the device then, as far as there are pages for it: mind `moves`.
        """
        found, _ = self._index.walk(prompt)
        del found[self._pages.most(len(found), found) :]
        self._pages.share(found)
        matched = min(len(found) * self.block, len(prompt))
        return Lease(prompt, found, matched, matched, bytearray(), [])

    def drop(self, key: bytes) -> bool:
        """Forget a block by force, used or not; False where no such key is known.

        What leads on from it cannot be found any more, and leaves in its turn.
        """
        block = self._index.get(key)
        if block is None:
            return False
        self._index.forget(block)
        self._pages.drop(block)
        return True

    def reset(self) -> bool:
        """Forget everything but the figures; False, and nothing is done, while blocks are held."""
        if self.active:
            return False
        self._pages.clear()
        self._index.clear()
        return True

    def _extent(self, prompt: Prompt, found: list[Block]) -> tuple[int, int]:
        """Tokens that were found, and those of them that need not be computed."""
        size = len(prompt)
        matched = min(len(found) * self.block, size)
        usable = min(matched, size - 1) if self.cap else matched
        return matched, usable - usable % self.block if self.mode == "full" else usable

    def _extend(self, lease: Lease, blocks: int, donor: Block | None, rows: int) -> None:
        """New blocks at the end of a table; the first with the first rows of the donor's."""
        table, take, free = lease.blocks, self._pages.take, self._pages.free
        if donor is not None:
            self._pages.hold(donor)
        table += [
            Block(free.pop() if free else take(), number) for number in range(len(table), blocks)
        ]
        if donor is not None:
            lease.copies.append(Copy(donor.page, table[donor.depth].page, rows))
            self._pages.put_back(donor)  # those that lead to it are held by the lease

    def _publish_full(self, lease: Lease, stop: int) -> None:
        """Make findable the full blocks of a lease up to number `stop`."""
        prompt, blocks, rekey = lease.prompt, lease.blocks, self.mode == "rekey"
        enter, size, known = self._index.enter, self.block * TOKEN, len(prompt) // self.block
        parent = blocks[lease.published - 1] if lease.published else prompt.root
        for number in range(lease.published, min(stop, len(blocks))):
            if number < known:
                key, own = prompt.keys[number], prompt.pieces[number]
            else:
                end = (number + 1) * size
                key, own = self._key(lease, number, end), bytes(lease.data[end - size : end])
            block = blocks[number]
            if rekey:
                self._index.remove(block)
            held = enter(block, key, parent, own)
            if held is None:  # and what lies behind it could not be found either
                return
            if held is not block:
                self._go_on_with(lease, number, held)
            lease.published = number + 1
            parent = held

    def _go_on_with(self, lease: Lease, number: int, held: Block) -> None:
        """Put a block that holds the same into the place of one of a lease's own."""
        block, far = lease.blocks[number], held.on_host
        if far:  # it went there while this one was computed, and comes back to its page
            self._pages.return_to(block.page, held)
        else:
            self._pages.hold(held)
        if number:  # a request uses a block no more often than those that lead to it
            held.uses = min(held.uses, lease.blocks[number - 1].uses)
        lease.blocks[number] = held
        if far:
            return
        self.counts.duplicates += 1
        block.refs -= 1
        if not block.refs:
            self._index.move(block, held)
            self._pages.free.append(block.page)

    def _publish_part(self, lease: Lease, end: int) -> None:
        """Make findable what the first `end` tokens leave in a block that they do not fill."""
        number, rows = divmod(end, self.block)
        if not rows or number != lease.published:  # full by now, or behind a collision
            return
        block, begin = lease.blocks[number], number * self.block * TOKEN
        key = self._key(lease, number, end * TOKEN)
        if key in block.keys:
            return
        if self.mode == "rekey":
            self._index.remove(block)
        # Where another one has the same, this one stays private.
        parent = lease.blocks[number - 1] if number else lease.prompt.root
        self._index.enter(block, key, parent, bytes(lease.data[begin : end * TOKEN]))

    def _key(self, lease: Lease, number: int, end: int) -> bytes:
        """The key of a block of a lease that holds its tokens up to byte `end`."""
        keys, block = lease.keys, self.block * TOKEN
        begin = number * block
        if number < len(keys) and end == min(begin + block, len(lease.prompt.data)):
            return keys[number]
        parent = keys[number - 1] if number else lease.prompt.root
        key = self.chain.key(lease.prompt.root, parent, lease.data, begin, end)
        if end - begin == block:
            keys[number:] = [key]
        return key
