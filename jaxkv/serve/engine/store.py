"""The prefix cache of the engine: prompts that share a prefix reuse its cache, bit-identically.

Append-only caches share pages of one chunk each. Evicting caches have lost tokens by the end of a
prompt, so they store snapshots of whole states at selected chunk boundaries. A prompt resumes only
at a multiple of the chunk, so its remaining chunks are computed as in a full prefill.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxkv.contract import Pages as SlotPages
from jaxkv.defaults import PREFIX_MEMORY
from jaxkv.errors import UserError, check_choice, check_int
from jaxkv.policy_spec import format_policy
from jaxkv.serve.engine import pool
from jaxkv.serve.engine.device_pool import DevicePool
from jaxkv.serve.engine.disk_tier import READ_SECONDS, DiskTier, settings_hash
from jaxkv.serve.engine.engine_metrics import prefix_metrics
from jaxkv.serve.engine.host_tier import HostTier, transfer
from jaxkv.serve.engine.model import Model
from jaxkv.serve.engine.pool import SKIP
from jaxkv.serve.engine.prefill import PrefillState
from jaxkv.serve.engine.programs import Programs
from jaxkv.serve.engine.request import Request
from jaxkv.serve.prefix.block_hash import TOKEN, HashedPrompt, root_hash
from jaxkv.serve.prefix.blocks import BlockPool
from jaxkv.serve.prefix.eviction import ORDERS
from jaxkv.serve.prefix.folder import PrefixFolder
from jaxkv.serve.prefix.lease import Block, Lease
from jaxkv.serve.prefix.snapshots import PrefillPlan, Snapshot, Snapshots, parse_rules
from jaxkv.state import memory


@dataclass(frozen=True, kw_only=True)
class PrefixConfig:
    """The settings of a prefix cache.

    memory: bytes on the device for blocks of one chunk each (append-only caches) or snapshots (all
    others). order: eviction order of unused blocks: lru, lru-deepest-first or lfu. where: chunk
    boundaries at which snapshots are stored, joined by +: `last`, the deepest from which the
    same prompt could resume; `branch`, the deepest up to which the prompt equals an earlier one;
    `every=N`. host_memory: bytes in the host's memory for blocks or snapshots evicted from the
    device. num_blocks, num_host_blocks: their numbers, instead of bytes. folder: where all of them
    are stored too, for the next engine with equal settings; the engine closes it when it stops.
    Raises UserError for bad numbers and unknown names.
    """

    memory: int = PREFIX_MEMORY
    order: str = "lru"
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
        check_choice("order", self.order, ORDERS)
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


class PrefixHit(NamedTuple):
    """The cached prefix of one prompt: its first `cached` tokens. lease: holds it."""

    cached: int
    lease: Lease | PrefillPlan


@runtime_checkable
class PrefixStore(Protocol):
    """The interface of both prefix stores. bytes: on the device. disk: what survives a restart."""

    bytes: int
    disk: DiskTier

    def find(self, request: Request) -> PrefixHit | None:
        """Look a prompt up and hold its cached prefix until `release`."""

    def load(self, hit: PrefixHit) -> PrefillState:
        """Copy a cached prefix into a new prefill state."""

    def save(self, hit: PrefixHit, state: PrefillState, at: int) -> None:
        """Store the prefix of `at` tokens from a prefill state, if the store wants it."""

    def release(self, hit: PrefixHit) -> None: ...

    def reset(self) -> bool:
        """Remove all prefixes; returns False, and does nothing, if one is held."""

    def metrics(self) -> dict[str, Any]: ...


def make_store(
    config: PrefixConfig, model: Model, programs: Programs, chunk: int, seed: int
) -> PrefixStore:
    """The store for a model's policies. Raises UserError if it does not fit into memory."""
    paged = pool.all_append_only(model.policies)
    return (BlockStore if paged else SnapshotStore)(config, model, programs, chunk, seed)


def model_root(model: Model, chunk: int, seed: int, salt: str | None) -> bytes:
    """The root hash of all settings that a cache depends on besides its tokens."""
    return root_hash(
        policy=format_policy(model.policies), model=model.identity, spec=repr(model.spec),
        chunk=chunk, seed=seed, salt=salt,
    )  # fmt: skip


class BlockStore:
    """Prefixes of append-only caches in shared blocks of one chunk, each with a record."""

    def __init__(
        self, config: PrefixConfig, model: Model, programs: Programs, chunk: int, seed: int
    ) -> None:
        states = programs.prefill_shapes.states
        layout = pool.prefix_layout(model.policies, states, chunk)
        size = pool.bytes_per_prefix(layout, model.policies, states)
        blocks, host = config.counts(size, size)
        self.index = BlockPool(chunk, blocks, mode="full", order=config.order, host_blocks=host)
        self._root, self._chunk = partial(model_root, model, chunk, seed), chunk
        movable = host > 0 or config.folder is not None
        self._device = DevicePool(layout, programs, model.vocab, blocks, blocks, movable)
        self.bytes = self._device.bytes
        self._host = HostTier(host, size)
        settings = settings_hash(self._root(None), states)
        like = self._device.piece if movable else None
        self.disk = DiskTier(config.folder, settings, like, blocks + host, self._copy)

    def find(self, request: Request) -> PrefixHit | None:
        """Hold the cached blocks of a prompt until `release`; `save` adds each new one."""
        prompt = self.index.hash_prompt(request.tokens, self._root(request.salt), request.owner)
        self.disk.touch(prompt.hashes, request.owner)
        self._read_until = time.monotonic() + READ_SECONDS
        cached = self.index.match(prompt).matched // self._chunk * self._chunk
        lease = self.index.admit(prompt, cached - len(prompt), True, self._restore)
        self._transfer()
        return None if lease is None else PrefixHit(lease.cached, lease)

    def load(self, hit: PrefixHit) -> PrefillState:
        count = hit.cached // self._chunk
        return self._device.load(hit.lease.pages[:count], hit.lease.pages[count - 1])

    def save(self, hit: PrefixHit, state: PrefillState, at: int) -> None:
        """Store the block that ends at `at`, unless it is stored or its owner can get no page."""
        number, blocks = at // self._chunk - 1, hit.lease.blocks
        if at % self._chunk or number >= min(self._device.layout.max_pages, len(blocks) + 1):
            return
        if number == len(blocks) and not self.index.extend(hit.lease):
            return
        self._transfer()
        page = hit.lease.pages[number]
        self.index.publish(hit.lease, at)
        if hit.lease.pages[number] == page:
            self._device.save(state, number, page, page)
            prompt, block = hit.lease.prompt, hit.lease.blocks[number]
            self.disk.add(block, prompt.hashes[number], own_bytes(prompt, number), block.owner)

    def release(self, hit: PrefixHit) -> None:
        self.index.release(hit.lease)

    def reset(self) -> bool:
        if not self.index.reset():
            return False
        self._host.clear()
        self.disk.clear()
        return True

    def metrics(self) -> dict[str, Any]:
        index, total, host = self.index, self.index.num_blocks, self._host.capacity
        used = total - index.free
        metrics = prefix_metrics(index.counts, total, used, index.active, host, index.host_taken)
        return metrics | self.disk.metrics()

    def _transfer(self) -> None:
        transfer(self.index.transfers, self._host, self._device.take, self._device.put)

    def _restore(self, prompt: HashedPrompt, number: int, page: int) -> bool:
        """Read block `number` of a prompt from the disk into a page, if it is there."""
        if not self.disk.has(prompt.hashes[number]) or time.monotonic() > self._read_until:
            return False
        piece = self.disk.read(prompt.hashes[number], own_bytes(prompt, number))
        if piece is None:  # those after it are computed too, and may be damaged too
            self.disk.discard(prompt.hashes[number + 1 :])
            return False
        self._transfer()  # the page may still have the content of an evicted block
        self._device.put(page, piece)
        return True

    def _copy(self, block: Block, hash: bytes) -> pool.Pool | None:
        if self.index.get(hash) is not block:  # it was evicted
            return None
        place = self._host.get if block.on_host else self._device.take
        return place(block.page)[0]


class SnapshotStore:
    """Snapshots of states at selected chunk boundaries, on the device and on the host.

    On the device, snapshots share equal pages of rarely rewritten leaves.
    """

    def __init__(
        self, config: PrefixConfig, model: Model, programs: Programs, chunk: int, seed: int
    ) -> None:
        states = programs.prefill_shapes.states
        layout = pool.prefix_layout(model.policies, states, chunk)
        size = pool.bytes_per_prefix(layout, model.policies, states)
        capacity, host = config.counts(size, programs.prefill_bytes)
        self.index, self._chunk = Snapshots(capacity, chunk, config.where, host), chunk
        self._root, self._capacity = partial(model_root, model, chunk, seed), capacity
        rewritten = pool.pages_of(model.policies[0]) if layout.max_pages else None
        self._page_ids = partial(page_ids, rewritten, chunk)
        pages = layout.max_pages * capacity
        self._device = DevicePool(layout, programs, model.vocab, pages, capacity)
        self._pages = SharedPages(pages)
        self._host = HostTier(host, programs.prefill_bytes)
        self.bytes = self._device.bytes
        settings = settings_hash(self._root(None), states)
        self.disk = DiskTier(config.folder, settings, states, capacity + host, self._copy)

    def find(self, request: Request) -> PrefixHit | None:
        root = self._root(request.salt)
        prompt = self.index.hash_prompt(request.tokens, root, request.owner)
        self.disk.touch(prompt.hashes, request.owner)
        self._restore(prompt)
        plan = self.index.plan_prefill(prompt)
        transfer(self.index.transfers, self._host, self._take, self._put)
        return PrefixHit(plan.start, plan)

    def load(self, hit: PrefixHit) -> PrefillState:
        return self._load(hit.lease.snapshot.index)

    def save(self, hit: PrefixHit, state: PrefillState, at: int) -> None:
        """Store a snapshot of `at` tokens if it is planned and an entry is available."""
        if at not in hit.lease.save:
            return
        snapshot = self.index.claim(hit.lease.prompt, at)
        if snapshot is None:
            return
        transfer(self.index.transfers, self._host, self._take, self._put)
        self._save(state, snapshot.index, self._page_ids(hit.lease.prompt, at))
        self.index.publish(snapshot)
        self.disk.add(snapshot, snapshot.hash, snapshot.data, snapshot.owner)

    def _restore(self, prompt: HashedPrompt) -> None:
        """Read the deepest snapshot on the disk, if memory has none that is as deep."""
        resident = self.index.find(prompt)
        resident_chunks = 0 if resident is None else resident.boundary // self._chunk
        for number in range((len(prompt) - 1) // self._chunk, resident_chunks, -1):
            hash, at = prompt.hashes[number - 1], number * self._chunk
            if not self.disk.has(hash):
                continue
            states = self.disk.read(hash, prompt.root + prompt.data[: at * TOKEN])
            if states is None:
                continue
            snapshot = self.index.claim(prompt, at)
            if snapshot is not None:
                transfer(self.index.transfers, self._host, self._take, self._put)
                self._put(snapshot.index, states, self._page_ids(prompt, at))
                self.index.publish(snapshot)
            return

    def _copy(self, snapshot: Snapshot, hash: bytes) -> pool.States | None:
        if self.index.get(hash) is not snapshot:  # it was evicted
            return None
        on_device = snapshot.tier.name == "device"
        return (self._take if on_device else self._host.get)(snapshot.index)[0]

    def _load(self, index: int) -> PrefillState:
        return self._device.load(self._pages.table(index), index)

    def _save(self, state: PrefillState, index: int, ids: list[Hashable]) -> None:
        """Write a state into an entry, with the pages that no other snapshot has."""
        self._pages.release(index)
        for number, page in self._pages.take(index, ids):
            self._device.save(state, number, page, SKIP)
        self._device.save(state, 0, SKIP, index)

    def release(self, hit: PrefixHit) -> None:
        self.index.release(hit.lease)

    def reset(self) -> bool:
        if not self.index.reset():
            return False
        self._pages.clear()
        self._host.clear()
        self.disk.clear()
        return True

    def metrics(self) -> dict[str, Any]:
        index, total, host = self.index, self._capacity, self._host.capacity
        taken, host_taken = index.taken, index.host_taken
        metrics = prefix_metrics(index.counts, total, taken, index.held, host, host_taken)
        return metrics | self.disk.metrics()

    def _take(self, index: int) -> tuple[pool.States, list[Hashable]]:
        return self._load(index).states, self._pages.ids(index)

    def _put(self, index: int, states: pool.States, ids: list[Hashable]) -> None:
        self._save(PrefillState(states, None), index, ids)


def own_bytes(prompt: HashedPrompt, number: int) -> bytes:
    """What the hash of block `number` stands for: the hash before it, and the block's tokens."""
    return (prompt.hashes[number - 1] if number else prompt.root) + prompt.blocks[number]


def page_ids(pages: SlotPages | None, chunk: int, prompt: HashedPrompt, at: int) -> list[Hashable]:
    """The identity of each page of a state after `at` tokens: equal ids mean equal content.

    An id is the root and tokens up to the boundary after the page's last write, the token of that
    write, and the page number. pages: None where there are none.
    """
    ids: list[Hashable] = []
    for number, last in enumerate(pages.last_write(at) if pages is not None else ()):
        boundary = -(-last // chunk)
        # The tokens and not their hash, which may collide.
        ids.append((prompt.root + prompt.data[: boundary * chunk * TOKEN], last, number))
    return ids


class SharedPages:
    """The pages of each snapshot; pages with equal ids are stored once.

    count: all pages, enough for every snapshot to have its own.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.clear()

    def clear(self) -> None:
        """Free all pages."""
        self._free = list(reversed(range(self._count)))
        self._by_id: dict[Hashable, int] = {}
        self._readers: Counter[Hashable] = Counter()
        self._tables: dict[int, list[Hashable]] = {}

    @property
    def taken(self) -> int:
        return len(self._by_id)

    def table(self, index: int) -> list[int]:
        """The pages of snapshot `index`, in order."""
        return [self._by_id[id] for id in self._tables.get(index, ())]

    def ids(self, index: int) -> list[Hashable]:
        return self._tables.get(index, [])

    def take(self, index: int, ids: list[Hashable]) -> list[tuple[int, int]]:
        """Assign pages to snapshot `index`; returns the new ones to write, as (number, page)."""
        new = [number for number, id in enumerate(ids) if id not in self._by_id]
        for number in new:
            self._by_id[ids[number]] = self._free.pop()
        self._readers.update(ids)
        self._tables[index] = ids
        return [(number, self._by_id[ids[number]]) for number in new]

    def release(self, index: int) -> None:
        """Release the pages of snapshot `index`, if it has any."""
        for id in self._tables.pop(index, ()):
            self._readers[id] -= 1
            if not self._readers[id]:
                del self._readers[id]
                self._free.append(self._by_id.pop(id))
