"""The index of "Hashing Table Prefixing Implementation Report": its block hashes and its evictions.

The engine's index (jaxkv/serve/prefix) stores full blocks alone. This one also finds the last block
of a prompt that is not full, as the report does. It has no pages: a block stands for its page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count

from jaxkv.errors import check_choice, check_int
from jaxkv.serve.prefix import MISS_REASONS, BlockHasher, HashedPrompt
from jaxkv.serve.prefix.block_hash import LENGTH, TOKEN, Hash, TokenIds, encode, sha256
from jaxkv.serve.prefix.index import RecentSet

MODES = ("alias", "rekey", "full")
HASHINGS = ("chained", "direct")


class LRU:
    """Evict the least recently added item first, in constant time.

    Callers add the tail of a prompt before its head.
    """

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, item: Hashable, time: int, depth: int) -> None:
        self._items[item] = None

    def remove(self, item: Hashable) -> None:
        del self._items[item]

    def pop(self) -> Hashable:
        return self._items.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._items)


class DeepestFirst:
    """The report's heap of heaps: evict the oldest first, of one time the deepest.

    Slow: it compares all items. The ancestors of an item have at least its time.
    """

    def __init__(self) -> None:
        self._ranks: dict[Hashable, tuple[int, int]] = {}

    def add(self, item: Hashable, time: int, depth: int) -> None:
        self._ranks[item] = (time, -depth)

    def remove(self, item: Hashable) -> None:
        del self._ranks[item]

    def pop(self) -> Hashable:
        item = next(iter(self))
        del self._ranks[item]
        return item

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(sorted(self._ranks, key=self._ranks.__getitem__))


ORDERS: dict[str, Callable[[], LRU | DeepestFirst]] = {
    "lru": LRU,
    "lru-deepest-first": DeepestFirst,
}


@dataclass(slots=True)
class Lookups:
    """Totals over all lookups.

    blocks: all blocks that the prompts touch. missed: missed tokens by reason; with tokens_hit they
    add up to tokens.
    """

    tokens: int = 0
    tokens_hit: int = 0
    blocks: int = 0
    blocks_hit: int = 0
    requests: int = 0
    requests_hit: int = 0
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))

    def add(self, tokens: int, hit: int, block: int, missed: dict[str, int]) -> None:
        """Count one prompt of `tokens` tokens, of which the first `hit` were cached."""
        self.tokens += tokens
        self.tokens_hit += hit
        self.blocks += -(-tokens // block)
        self.blocks_hit += -(-hit // block)
        self.requests += 1
        self.requests_hit += hit > 0
        for reason, tokens_missed in missed.items():
            self.missed[reason] += tokens_missed


@dataclass(slots=True, eq=False)
class Block:
    """One block.

    depth: blocks before it in its prompt. refs: tables that contain it. hashes: its
    entries in the index; none before publication, two if a prompt's partial tail was filled later.
    parent: the block before it, or the root hash. tokens: the encoded tokens that a lookup
    compares.
    """

    depth: int
    refs: int = 1
    hashes: tuple[bytes, ...] = ()
    parent: Block | bytes = b""
    tokens: bytes = b""


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of one request.

    length: tokens in the table. cached: tokens at its beginning that need not be computed.
    published: full blocks that lookups can find. It stops growing while another prefix has the hash
    of the next block.
    """

    prompt: HashedPrompt
    blocks: list[Block]
    length: int
    cached: int
    data: bytearray
    hashes: list[bytes]
    published: int = 0
    tail_published: bool = False


class Simulator:
    """Blocks of prompts, found by the hash of all tokens up to their end.

    block_size: tokens in a block.
    capacity: maximum number of unused blocks that stay cached (the report's K); None for no limit.
    mode: how a prompt's partial last block is found. `full`: not at all. `alias`: by the prompt's
      tokens, and a reader copies it. `rekey` (the report): by its current tokens, so no longer by
      the prompt once a token was appended.
    order: eviction order, of ORDERS.
    hashing: `chained` hashes the parent's hash and the block's tokens; `direct` hashes the root and
      all tokens up to the block's end, as in the report.
    cap: leave at least the last token of a prompt to compute, because its logits are needed.
    clock: returns the time of a release; by default a counter.
    ghosts: evicted hashes that are remembered to explain misses.
    Raises UserError for an unknown mode, order or hashing, and for sizes below 1.
    """

    def __init__(
        self,
        block_size: int,
        capacity: int | None = None,
        mode: str = "alias",
        order: str = "lru",
        hashing: str = "chained",
        cap: bool = True,
        clock: Callable[[], int] | None = None,
        ghosts: int = 2**16,
        hash: Hash = sha256,
    ) -> None:
        check_choice("mode", mode, MODES)
        check_choice("order", order, ORDERS)
        check_choice("hashing", hashing, HASHINGS)
        if capacity is not None:
            check_int("capacity", capacity, 0)
        self._hasher = BlockHasher(block_size, hash)
        self.block_size, self.capacity, self.mode, self.cap = block_size, capacity, mode, cap
        self.lookups, self.evictions, self.duplicates = Lookups(), 0, 0
        self.cached = ORDERS[order]()
        self.entries: dict[bytes, Block] = {}
        self._direct, self._clock = hashing == "direct", clock or count().__next__
        self._ghosts = RecentSet(ghosts)
        # Written tokens never change, so a block whose first tokens are equal is valid.
        self._same = bytes.startswith if mode == "alias" else bytes.__eq__

    def hash_prompt(self, tokens: TokenIds, root: bytes) -> HashedPrompt:
        """Hash a prompt for `admit`; except in mode `full`, also a last block that is not full."""
        prompt = self._hasher.hash_prompt(tokens, root)
        data, hashes, size = prompt.data, prompt.hashes, self.block_size * TOKEN
        end = len(data) - len(data) % size
        if self.mode != "full" and end < len(data):
            prompt.blocks.append(data[end:])
            parent = hashes[-1] if hashes else root
            hashes.append(self._hash_block(root, parent, data, end, len(data)))
        if self._direct:
            ends = (number * size + size for number in range(len(hashes)))
            hashes[:] = [self._hasher.hash(root + data[:end]) for end in ends]
        return prompt

    def admit(self, prompt: HashedPrompt) -> Table:
        """Take cached and new blocks for a prompt, and count the lookup."""
        found_blocks, collided = self._walk(prompt)
        size, block_size = len(prompt), self.block_size
        matched = min(len(found_blocks) * block_size, size)
        usable = min(matched, size - 1) if self.cap else matched
        if self.mode == "full":
            usable -= usable % block_size
        full, tail = divmod(usable, block_size)
        # The report shares a tail too; the first request that writes to it takes a copy.
        if tail and self.mode == "rekey" and usable == size:
            full, tail = full + 1, 0
        blocks = found_blocks[:full]
        for block in blocks:
            self._hold(block)
        published = min(full, size // block_size)
        if tail:  # a copy of the first tokens of this block counts as its use
            self._hold(found_blocks[full])
            self._release(found_blocks[full], self._clock())
        blocks += [Block(number) for number in range(full, -(-size // block_size))]
        missed = self._missed(prompt, len(found_blocks), usable, collided)
        self.lookups.add(size, usable, block_size, missed)
        return Table(
            prompt, blocks, size, usable, bytearray(prompt.data), list(prompt.hashes), published
        )

    def publish(self, table: Table) -> None:
        """Let lookups find the blocks of a table.

        If another request published an equal block first, the table switches to that block.
        """
        size = len(table.prompt)
        if self.mode == "alias" and not table.tail_published:
            table.tail_published = True
            self._publish_full(table, size // self.block_size)
            self._publish_tail(table, size)
        self._publish_full(table, table.length // self.block_size)
        if self.mode == "rekey":
            self._publish_tail(table, table.length)

    def append(self, table: Table, token: int) -> None:
        """Add one token to a table."""
        number, offset = divmod(table.length, self.block_size)
        if number == len(table.blocks):
            table.blocks.append(Block(number))
        elif offset and table.blocks[number].refs > 1 and self.mode == "rekey":
            table.blocks[number].refs -= 1
            table.blocks[number] = Block(number)  # a copy
        table.data += encode((token,))
        table.length += 1

    def release(self, table: Table) -> None:
        """Release a table; published blocks stay cached until eviction, tails leave first."""
        time = self._clock()
        for block in reversed(table.blocks):
            # Insert first, then evict: the other order would cut a chain in two.
            self._release(block, time)
            if self.capacity is not None and len(self.cached) > self.capacity:
                self.evict()

    def evict(self) -> None:
        """Lose the next cached block."""
        block = self.cached.pop()
        for hash in block.hashes:
            del self.entries[hash]
            self._ghosts.add(hash)
        block.hashes = ()
        self.evictions += 1

    def _hold(self, block: Block) -> None:
        if not block.refs:
            self.cached.remove(block)
        block.refs += 1

    def _release(self, block: Block, time: int) -> None:
        block.refs -= 1
        if not block.refs and block.hashes:
            self.cached.add(block, time, block.depth)

    def _walk(self, prompt: HashedPrompt) -> tuple[list[Block], bool]:
        """The blocks that hold a prompt's beginning, and whether a hash collision ended them."""
        entries, same = self.entries, self._same
        blocks: list[Block] = []
        parent: Block | bytes = prompt.root
        for hash, tokens in zip(prompt.hashes, prompt.blocks, strict=True):
            block = entries.get(hash)
            if block is None:
                return blocks, False
            if block.parent != parent or not same(block.tokens, tokens):
                return blocks, True
            blocks.append(block)
            parent = block
        return blocks, False

    def _missed(
        self, prompt: HashedPrompt, num_blocks: int, usable: int, collided: bool
    ) -> dict[str, int]:
        """The missed tokens by reason. num_blocks: found. usable: tokens of them that are used."""
        size, block, hashes = len(prompt), self.block_size, prompt.hashes
        at, end = min(num_blocks * block, size), min(len(hashes) * block, size)
        missed = {"last_token": at - usable, "tail": size - end}
        if collided:
            return missed | {"collision": end - at}
        # A block that is still in the index comes after one that was evicted.
        numbers = [
            number
            for number in range(num_blocks, len(hashes))
            if hashes[number] in self._ghosts or hashes[number] in self.entries
        ]
        evicted = sum(min(block, size - number * block) for number in numbers)
        return missed | {"evicted": evicted, "cold": end - at - evicted}

    def _publish_full(self, table: Table, stop: int) -> None:
        """Publish the full blocks of a table up to number `stop`."""
        size = self.block_size * TOKEN
        parent = table.blocks[table.published - 1] if table.published else table.prompt.root
        for number in range(table.published, stop):
            block, end = table.blocks[number], (number + 1) * size
            hash = self._hash(table, number, end)
            if self.mode == "rekey":
                self._unpublish(block)
            present = self._insert(block, hash, parent, bytes(table.data[end - size : end]))
            if present is None:  # no lookup could reach the blocks after it either
                return
            if present is not block:
                self._replace(table, number, present)
            table.published = number + 1
            parent = present

    def _publish_tail(self, table: Table, end: int) -> None:
        """Publish the partial block in which the first `end` tokens end."""
        number, tokens = divmod(end, self.block_size)
        if not tokens or number != table.published:  # it is full by now, or follows a collision
            return
        block, begin = table.blocks[number], number * self.block_size * TOKEN
        hash = self._hash(table, number, end * TOKEN)
        if hash in block.hashes:
            return
        if self.mode == "rekey":
            self._unpublish(block)
        # If another block has the same content, this one stays private.
        parent = table.blocks[number - 1] if number else table.prompt.root
        self._insert(block, hash, parent, bytes(table.data[begin : end * TOKEN]))

    def _insert(
        self, block: Block, hash: bytes, parent: Block | bytes, tokens: bytes
    ) -> Block | None:
        """Publish a block; returns the block that has this hash: this one, or an equal earlier one.

        Returns None if the earlier block has other content; it stays.
        """
        present = self.entries.get(hash)
        if present is None:
            self.entries[hash] = present = block
            block.hashes = (*block.hashes, hash)
        elif present is not block:
            equal = present.parent == parent and self._same(present.tokens, tokens)
            return present if equal else None
        block.parent, block.tokens = parent, tokens
        return present

    def _unpublish(self, block: Block) -> None:
        """Unpublish a block whose content changes."""
        for hash in block.hashes:
            del self.entries[hash]
        block.hashes = ()

    def _replace(self, table: Table, number: int, present: Block) -> None:
        """Replace one of a table's blocks by a published block with the same content."""
        block = table.blocks[number]
        self._hold(present)
        table.blocks[number] = present
        self.duplicates += 1
        block.refs -= 1
        if not block.refs:
            for hash in block.hashes:
                self.entries[hash] = present
            present.hashes, block.hashes = (*present.hashes, *block.hashes), ()

    def _hash(self, table: Table, number: int, end: int) -> bytes:
        """The hash of block `number` of a table with its tokens up to byte `end`."""
        hashes, size = table.hashes, self.block_size * TOKEN
        begin = number * size
        if number < len(hashes) and end == min(begin + size, len(table.prompt.data)):
            return hashes[number]
        parent = hashes[number - 1] if number else table.prompt.root
        hash = self._hash_block(table.prompt.root, parent, table.data, begin, end)
        if end - begin == size:
            hashes[number:] = [hash]
        return hash

    def _hash_block(
        self, root: bytes, parent: bytes, data: bytes | bytearray, begin: int, end: int
    ) -> bytes:
        if self._direct:
            return self._hasher.hash(root + data[:end])
        return self._hasher.hash(parent + LENGTH.pack(end - begin) + data[begin:end])
