"""The index of cached prompt prefixes. It runs on the host and imports no JAX.

`blocks` shares equal blocks among requests. `snapshots` stores whole states at chunk boundaries.
"""

from jaxkv.serve.prefix.block_hash import BlockHasher, HashedPrompt, encode, root_hash
from jaxkv.serve.prefix.blocks import BlockPool
from jaxkv.serve.prefix.counts import MISS_REASONS, Counts, Lookups
from jaxkv.serve.prefix.lease import Copy, Lease, Match
from jaxkv.serve.prefix.snapshots import PrefillPlan, Snapshot, Snapshots
from jaxkv.serve.prefix.tier import Transfer

__all__ = [
    "MISS_REASONS",
    "BlockHasher",
    "BlockPool",
    "Copy",
    "Counts",
    "HashedPrompt",
    "Lease",
    "Lookups",
    "Match",
    "PrefillPlan",
    "Snapshot",
    "Snapshots",
    "Transfer",
    "encode",
    "root_hash",
]
