"""The index of "Hashing Table Prefixing Implementation Report": its block hashes and its evictions.

The engine's index (jaxkv/serve/prefix) stores full blocks alone. This one also finds the last block
of a prompt that is not full, as the report does. It has no pages: a block stands for its page. All
tokens of a prompt may hit, also the last, whose logits an engine computes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from jaxkv.errors import check_choice, check_int
from jaxkv.serve.prefix import BlockHasher, HashedPrompt
from jaxkv.serve.prefix.block_hash import LENGTH, TOKEN, TokenIds, encode

MODES = ("alias", "rekey", "full")
HASHINGS = ("chained", "direct")


@dataclass(slots=True, eq=False)
class Block:
    """One block.

    refs: tables that contain it. hashes: its entries in the index; none before publication, two if
    a prompt's partial tail was filled later.
    """

    refs: int = 1
    hashes: tuple[bytes, ...] = ()


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of one request.

    length: tokens in the table. cached: tokens at its beginning that need not be computed.
    published: full blocks that lookups can find.
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
      The least recently used leaves first, of one prompt the tail before the head.
    mode: how a prompt's partial last block is found. `full`: not at all. `alias`: by the prompt's
      tokens, and a reader copies it. `rekey` (the report): by its current tokens, so no longer by
      the prompt once a token was appended.
    hashing: `chained` hashes the parent's hash and the block's tokens; `direct` hashes the root and
      all tokens up to the block's end, as in the report.
    Raises UserError for an unknown mode or hashing, and for sizes below 1.

    blocks, blocks_hit: blocks of all admitted prompts, and those of them that were cached.
    """

    def __init__(
        self,
        block_size: int,
        capacity: int | None = None,
        mode: str = "alias",
        hashing: str = "chained",
    ) -> None:
        check_choice("mode", mode, MODES)
        check_choice("hashing", hashing, HASHINGS)
        if capacity is not None:
            check_int("capacity", capacity, 0)
        self._hasher = BlockHasher(block_size)
        self.block_size, self.capacity, self.mode = block_size, capacity, mode
        self.blocks = self.blocks_hit = 0
        self.cached: OrderedDict[Block, None] = OrderedDict()  # unused, the next to evict first
        self.entries: dict[bytes, Block] = {}
        self._direct = hashing == "direct"

    def hash_prompt(self, tokens: TokenIds, root: bytes) -> HashedPrompt:
        """Hash a prompt for `admit`; except in mode `full`, also a last block that is not full."""
        prompt = self._hasher.hash_prompt(tokens, root)
        data, hashes, size = prompt.data, prompt.hashes, self.block_size * TOKEN
        end = len(data) - len(data) % size
        if self.mode != "full" and end < len(data):
            parent = hashes[-1] if hashes else root
            hashes.append(self._hash_block(root, parent, data, end, len(data)))
        if self._direct:
            ends = (number * size + size for number in range(len(hashes)))
            hashes[:] = [self._hasher.hash(root + data[:end]) for end in ends]
        return prompt

    def admit(self, prompt: HashedPrompt) -> Table:
        """Take cached and new blocks for a prompt, and count the lookup."""
        found_blocks = self._walk(prompt)
        size, block_size = len(prompt), self.block_size
        cached = min(len(found_blocks) * block_size, size)
        full, tail = divmod(cached, block_size)
        # The report shares a tail too; the first request that writes to it takes a copy.
        if tail and self.mode == "rekey":
            full, tail = full + 1, 0
        blocks = found_blocks[:full]
        for block in blocks:
            self._hold(block)
        if tail:  # a copy of the first tokens of this block counts as its use
            self._hold(found_blocks[full])
            self._release(found_blocks[full])
        num_blocks = -(-size // block_size)
        blocks += [Block() for _ in range(full, num_blocks)]
        self.blocks += num_blocks
        self.blocks_hit += len(found_blocks)
        published = min(full, size // block_size)
        return Table(
            prompt, blocks, size, cached, bytearray(prompt.data), list(prompt.hashes), published
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
            table.blocks.append(Block())
        elif offset and table.blocks[number].refs > 1 and self.mode == "rekey":
            table.blocks[number].refs -= 1
            table.blocks[number] = Block()  # a copy
        table.data += encode((token,))
        table.length += 1

    def release(self, table: Table) -> None:
        """Release a table; published blocks stay cached until eviction, tails leave first."""
        for block in reversed(table.blocks):
            # Insert first, then evict: the other order would cut a chain in two.
            self._release(block)
            if self.capacity is not None and len(self.cached) > self.capacity:
                self._unpublish(self.cached.popitem(last=False)[0])

    def _hold(self, block: Block) -> None:
        if not block.refs:
            del self.cached[block]
        block.refs += 1

    def _release(self, block: Block) -> None:
        block.refs -= 1
        if not block.refs and block.hashes:
            self.cached[block] = None

    def _walk(self, prompt: HashedPrompt) -> list[Block]:
        """The blocks that hold a prompt's beginning."""
        blocks: list[Block] = []
        for hash in prompt.hashes:
            block = self.entries.get(hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _publish_full(self, table: Table, stop: int) -> None:
        """Publish the full blocks of a table up to number `stop`."""
        for number in range(table.published, stop):
            block = table.blocks[number]
            hash = self._hash(table, number, (number + 1) * self.block_size * TOKEN)
            if self.mode == "rekey":
                self._unpublish(block)
            present = self._insert(block, hash)
            if present is not block:
                self._replace(table, number, present)
            table.published = number + 1

    def _publish_tail(self, table: Table, end: int) -> None:
        """Publish the partial block in which the first `end` tokens end."""
        number, tokens = divmod(end, self.block_size)
        if not tokens:
            return
        block, hash = table.blocks[number], self._hash(table, number, end * TOKEN)
        if hash in block.hashes:
            return
        if self.mode == "rekey":
            self._unpublish(block)
        self._insert(block, hash)  # if another block has the same content, this one stays private

    def _insert(self, block: Block, hash: bytes) -> Block:
        """Publish a block; returns the block of this hash: this one, or an equal earlier one."""
        present = self.entries.setdefault(hash, block)
        if present is block and hash not in block.hashes:
            block.hashes = (*block.hashes, hash)
        return present

    def _unpublish(self, block: Block) -> None:
        """Unpublish a block whose content changes, or that is evicted."""
        for hash in block.hashes:
            del self.entries[hash]
        block.hashes = ()

    def _replace(self, table: Table, number: int, present: Block) -> None:
        """Replace one of a table's blocks by a published block with the same content."""
        block = table.blocks[number]
        self._hold(present)
        table.blocks[number] = present
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
