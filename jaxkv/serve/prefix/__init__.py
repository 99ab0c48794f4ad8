"""The index of cached prompt prefixes. It runs on the host and imports no JAX."""

from jaxkv.serve.prefix.block_hash import BlockHasher, HashedPrompt, encode, root_hash
from jaxkv.serve.prefix.index import Counts, Entry, Lease, PrefixIndex

__all__ = [
    "BlockHasher",
    "Counts",
    "Entry",
    "HashedPrompt",
    "Lease",
    "PrefixIndex",
    "encode",
    "root_hash",
]
