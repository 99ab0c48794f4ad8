"""The blocks of a pool, and the block tables through which requests hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from jaxkv.serve.prefix.block_hash import HashedPrompt


@dataclass(slots=True, eq=False)
class Block:
    """The content of one page, from allocation until the page is free again.

    page: its page number; a page of the host if `on_host`. depth: blocks before it in its prompt.
    refs: block tables that contain it. uses: requests that it has served. hashes: its entries in
    the index; none before publication, two if a prompt's partial tail was filled later. parent:
    the block before it, or the root hash. tokens: the encoded tokens that a lookup compares. owner:
    whose share it takes, the same for all blocks after one first block.
    """

    page: int
    depth: int
    refs: int = 1
    uses: int = 1
    hashes: tuple[bytes, ...] = ()
    parent: Block | bytes = b""
    tokens: bytes = b""
    on_host: bool = False
    owner: str | None = None


class Copy(NamedTuple):
    """Copy the first `tokens` tokens of page `source` to page `target`."""

    source: int
    target: int
    tokens: int


class Match(NamedTuple):
    """The cached part of a prompt.

    pages: the pages of its first blocks, up to the first that is not on the device. matched:
    cached tokens. usable: matched tokens that need not be computed. missed: all other tokens, by
    reason.
    """

    pages: list[int]
    matched: int
    usable: int
    missed: dict[str, int]


@dataclass(slots=True, eq=False)
class Lease:
    """The block table of one request.

    length: tokens in the table. cached: tokens at its beginning that need not be computed. copies:
    copies to do before any write, oldest first; the caller clears the list. published: full blocks
    that lookups can find. It stops growing while another prefix has the hash of the next block.
    """

    prompt: HashedPrompt
    blocks: list[Block]
    length: int
    cached: int
    data: bytearray
    hashes: list[bytes]
    copies: list[Copy] = field(default_factory=list)
    published: int = 0
    tail_published: bool = False
    released: bool = False

    @property
    def pages(self) -> list[int]:
        """The page number of each block."""
        return [block.page for block in self.blocks]


def leading_on_device(blocks: list[Block]) -> list[Block]:
    """The blocks before the first one that is in the host's memory."""
    return list(takewhile(lambda block: not block.on_host, blocks))
