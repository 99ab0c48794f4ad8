"""What requests hold of a pool: pages with what is known of them, and tables of such."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from jaxkv.prefix.keys import Prompt


@dataclass(slots=True, eq=False)
class Block:
    """What is in one page, from when it is taken until it is free again.

    page: where it is, of those of the host where `on_host`. depth: blocks before it. refs: tables
    that it stands in. uses: requests it ever served. keys: by which it is found, none until it is
    published; two where a prompt's tail grew until it was full. parent: the block before it, or the
    root. tokens: those that it is found by, encoded.
    """

    page: int
    depth: int
    refs: int = 1
    uses: int = 1
    keys: tuple[bytes, ...] = ()
    parent: Block | bytes = b""
    tokens: bytes = b""
    on_host: bool = False


class Copy(NamedTuple):
    """The first `rows` tokens of a page, wanted in another."""

    source: int
    target: int
    rows: int


class Match(NamedTuple):
    """What an index has of a prompt.

    pages: in which its beginning is, as far as it is on the device. matched: tokens found. usable:
    those of them that need not be computed. missed: all others, by reason.
    """

    pages: list[int]
    matched: int
    usable: int
    missed: dict[str, int]


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks of one request, its table.

    length: tokens that it holds. cached: those at its beginning that need not be computed. copies:
    what must be copied before anything is written, oldest first; whoever does so clears the list.
    published: full blocks that were made findable; no more are while another prefix has the key of
    the next one.
    """

    prompt: Prompt
    blocks: list[Block]
    length: int
    cached: int
    data: bytearray
    keys: list[bytes]
    copies: list[Copy] = field(default_factory=list)
    published: int = 0
    tail_published: bool = False
    released: bool = False

    @property
    def pages(self) -> list[int]:
        """The block table."""
        return [block.page for block in self.blocks]


def near(blocks: list[Block]) -> list[Block]:
    """The first of them, as far as they are on the device."""
    return list(takewhile(lambda block: not block.on_host, blocks))
