"""The prefix cache of the engine: prompts that share a prefix reuse its cache, bit-identically.

Append-only caches share pages of one chunk each. Evicting caches have lost tokens by the end of a
prompt, so they store snapshots of whole states at selected chunk boundaries. A prompt resumes only
at a multiple of the chunk, so its remaining chunks are computed as in a full prefill.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxkv.defaults import PREFIX_MEMORY
from jaxkv.errors import UserError, check_int
from jaxkv.policy_spec import budgets_identity, format_policy
from jaxkv.serve.engine import pool
from jaxkv.serve.engine.disk_tier import (
    READ_SECONDS,
    DiskTier,
    check_limit,
    settings_hash,
)
from jaxkv.serve.engine.model import Model
from jaxkv.serve.engine.placement import placed_pool
from jaxkv.serve.engine.prefill import PrefillState, init_prefill
from jaxkv.serve.engine.programs import Programs
from jaxkv.serve.engine.request import Request
from jaxkv.serve.engine.tiers import BlockTier, HostTier, SnapshotTier
from jaxkv.serve.prefix.block_hash import HashedPrompt, root_hash
from jaxkv.serve.prefix.folder import PrefixFolder
from jaxkv.serve.prefix.index import Counts, Entry, Lease, PrefixIndex, parse_rules
from jaxkv.state import memory
from jaxkv.state.batch import nbytes
from jaxkv.state.sharding import bytes_per_device

DISK = ("entries", "bytes", "entries_waiting", "hits", "writes", "failures", "evictions", "lost")


@dataclass(frozen=True, kw_only=True)
class PrefixConfig:
    """The settings of a prefix cache.

    memory: bytes on the device for blocks of one chunk each (append-only caches) or snapshots (all
    others). where: chunk boundaries at which snapshots are stored, joined by +: `last`, the deepest
    from which the same prompt could resume; `branch`, the deepest up to which the prompt equals an
    earlier one; `every=N`. host_memory: bytes in the host's memory for blocks or snapshots evicted
    from the device. num_blocks, num_host_blocks: their numbers, instead of bytes. folder: where all
    of them are stored too, for the next engine with equal settings; the engine closes it when it
    stops. Raises UserError for bad numbers and unknown names.
    """

    memory: int = PREFIX_MEMORY
    where: str = "last+branch"
    host_memory: int = 0
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    folder: PrefixFolder | None = None

    def __post_init__(self) -> None:
        check_int("memory", self.memory)
        check_int("host_memory", self.host_memory, 0)
        if self.num_blocks is not None:
            check_int("num_blocks", self.num_blocks)
        if self.num_host_blocks is not None:
            check_int("num_host_blocks", self.num_host_blocks, 0)
        parse_rules(self.where)

    def counts(self, size: int, host_size: int) -> tuple[int, int]:
        """Blocks or snapshots on the device and on the host; size, host_size: bytes of one.

        Raises UserError if the memory holds none.
        """
        blocks = self.memory // size if self.num_blocks is None else self.num_blocks
        if not blocks:
            raise UserError(
                f"the prefix cache must hold one prefix, which takes {memory.show(size)}, got "
                f"{memory.show(self.memory)}; give memory= (--prefix-memory) more, or leave the "
                "cache out"
            )
        if self.num_host_blocks is not None:
            return blocks, self.num_host_blocks
        if 0 < self.host_memory < host_size:
            raise UserError(
                f"host memory must hold one prefix, which takes {memory.show(host_size)}, got "
                f"{memory.show(self.host_memory)}; give host_memory= (--prefix-host-memory) more"
            )
        return blocks, self.host_memory // host_size


def check_prefixes(config: PrefixConfig, model: Model, max_len: int | None, chunk: int) -> None:
    """Raise UserError where a memory or the folder cannot hold one prefix; nothing is compiled."""
    state = jax.eval_shape(lambda: init_prefill(model, max_len, np.uint32(0)))
    layout = pool.prefix_layout(model.policies, state.states, chunk)
    prefix = pool.shapes_of_prefix(layout, model.policies, state.states)
    size, linked = nbytes(prefix), pool.all_append_only(model.policies)
    on_device = bytes_per_device(placed_pool(model, layout, prefix))
    config.counts(on_device, size if linked else nbytes(state))
    if config.folder is not None:
        check_limit(config.folder, size if linked else nbytes(state.states))


class PrefixStore:
    """Cached prefixes of one engine.

    bytes: on the device. disk: what survives a restart.
    Raises UserError if the prefixes do not fit into memory.
    """

    def __init__(
        self, config: PrefixConfig, model: Model, programs: Programs, chunk: int, seed: int
    ) -> None:
        states = programs.prefill_shapes.states
        layout = pool.prefix_layout(model.policies, states, chunk)
        prefix = pool.shapes_of_prefix(layout, model.policies, states)
        linked = pool.all_append_only(model.policies)
        host_size = nbytes(prefix) if linked else nbytes(programs.prefill_shapes)
        on_device = bytes_per_device(placed_pool(model, layout, prefix))
        capacity, host = config.counts(on_device, host_size)
        self._device: BlockTier | SnapshotTier
        if linked:
            movable = host > 0 or config.folder is not None
            self._device = BlockTier(layout, programs, model.vocab, capacity, movable)
            self._max_tokens = layout.max_pages * chunk
        else:
            rewritten = pool.pages_of(model.policies[0]) if layout.max_pages else None
            self._device = SnapshotTier(layout, programs, model.vocab, capacity, chunk, rewritten)
            self._max_tokens = sys.maxsize
        self._tiers = (self._device, HostTier(host, host_size))
        self.index = PrefixIndex(
            chunk, (capacity, host), linked=linked, where=config.where, move=self._move
        )
        self._root = partial(model_root, model, chunk, seed)
        self.bytes = self._device.bytes
        settings = settings_hash(self._root(None), states)
        self.disk = DiskTier(
            config.folder, settings, self._device.like, capacity + host, self._arrays
        )

    def find(self, request: Request) -> Lease:
        """Hold the cached prefix of a prompt until `release`; it may come from the disk."""
        index, root = self.index, self._root(request.salt)
        prompt = index.hash_prompt(request.tokens, root, request.owner)
        self.disk.touch(prompt.hashes, request.owner)
        if not index.linked:
            self._restore_snapshot(prompt)
        lease = index.hold(prompt)
        if index.linked:
            self._restore_blocks(lease)
        index.start(lease)
        return lease

    def load(self, lease: Lease) -> PrefillState:
        """Copy a cached prefix into a new prefill state."""
        return self._device.load(lease.entries)

    def save(self, lease: Lease, state: PrefillState, at: int) -> None:
        """Store the prefix of `at` tokens, if that is planned and a place is available."""
        if at not in lease.save or at > self._max_tokens:
            return
        entry = self.index.claim(lease.prompt, at, lease)
        if entry is not None:
            self._device.save(entry, lease.prompt, state)
            self.index.publish(entry, lease)
            self.disk.add(entry)

    def release(self, lease: Lease) -> None:
        self.index.release(lease)

    def reset(self) -> bool:
        """Remove all prefixes; returns False, and does nothing, if one is held."""
        if not self.index.reset():
            return False
        for tier in self._tiers:
            tier.clear()
        self.disk.clear()
        return True

    def metrics(self) -> dict[str, Any]:
        return prefix_metrics(self.index) | self.disk.metrics()

    def _move(self, level: int, index: int, new_level: int, new_index: int) -> None:
        self._tiers[new_level].put(new_index, *self._tiers[level].take(index))

    def _arrays(self, entry: Entry) -> Any:
        """The arrays of an entry for the disk; None if it was evicted."""
        if self.index.get(entry.hash) is not entry:
            return None
        return self._tiers[entry.level].get(entry.index)[0]

    def _restore_blocks(self, lease: Lease) -> None:
        """Read the blocks that follow those of a lease from the disk, while there are any."""
        prompt, chunk, until = lease.prompt, self.index.chunk, time.monotonic() + READ_SECONDS
        for number in range(len(lease.entries) + 1, (len(prompt) - 1) // chunk + 1):
            if time.monotonic() > until or not self._restore(prompt, number, lease):
                return

    def _restore_snapshot(self, prompt: HashedPrompt) -> None:
        """Read the deepest snapshot on the disk, if memory has none that is as deep."""
        chunk, resident = self.index.chunk, next(self.index.matches(prompt), None)
        deepest = 0 if resident is None else resident.boundary // chunk
        for number in range((len(prompt) - 1) // chunk, deepest, -1):
            if self._restore(prompt, number):
                return

    def _restore(self, prompt: HashedPrompt, number: int, lease: Lease | None = None) -> bool:
        """Read the entry that ends after `number` chunks from the disk; returns whether it could.

        lease: that of the blocks before it.
        """
        hash, at = prompt.hashes[number - 1], number * self.index.chunk
        if not self.disk.has(hash) or self.index.get(hash) is not None:
            return False
        entry = self.index.claim(prompt, at, lease)
        if entry is None:  # every place is in use
            return False
        arrays = self.disk.read(entry)
        if arrays is None:
            self.index.withdraw(entry)
            if lease is not None:  # the blocks after it are computed too, and may be damaged too
                self.disk.discard(prompt.hashes[number:])
            return False
        self._device.put(entry.index, arrays, self._device.page_ids(prompt, at))
        self.index.publish(entry, lease)
        return True


def model_root(model: Model, chunk: int, seed: int, salt: str | None) -> bytes:
    """The root hash of all settings that a cache depends on besides its tokens."""
    return root_hash(
        policy=format_policy(model.policies) + budgets_identity(model.policies),
        model=model.identity,
        spec=repr(model.spec),
        chunk=chunk,
        seed=seed,
        salt=salt,
    )


def prefix_metrics(index: PrefixIndex | None) -> dict[str, Any]:
    """The metrics of a prefix index and of an empty disk; None: those of no prefix cache.

    An entry is a block or a snapshot.
    """
    counts = Counts() if index is None else index.counts
    tiers = (None, None) if index is None else index.tiers
    device, host = ((0, 0) if tier is None else (tier.capacity, tier.taken) for tier in tiers)
    return {
        "prefix_queries": counts.tokens,
        "prefix_hits": counts.tokens_hit,
        "prefix_entries": device[0],
        "prefix_entries_stored": device[1],
        "prefix_entries_in_use": 0 if index is None else index.in_use,
        "host_entries": host[0],
        "host_entries_stored": host[1],
        "misses": dict(counts.missed),
        "evictions": counts.evictions,
        "demotions": counts.demotions,
        "promotions": counts.promotions,
        **{f"disk_{name}": 0 for name in DISK},
    }
