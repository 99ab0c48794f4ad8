"""Which beginnings of prompts are in memory, and where: on the host, without a device.

`blocks` shares equal pages among requests, `snapshots` keeps whole states at boundaries.
"""

from jaxkv.prefix.blocks import BlockPool
from jaxkv.prefix.counts import REASONS, Counts, Lookups
from jaxkv.prefix.keys import Chain, Prompt, encode, root
from jaxkv.prefix.lease import Copy, Lease, Match
from jaxkv.prefix.snapshots import Move, Snapshot, Snapshots, Visit

__all__ = [
    "REASONS",
    "BlockPool",
    "Chain",
    "Copy",
    "Counts",
    "Lease",
    "Lookups",
    "Match",
    "Move",
    "Prompt",
    "Snapshot",
    "Snapshots",
    "Visit",
    "encode",
    "root",
]
