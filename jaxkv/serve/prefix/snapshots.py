"""Whole cache states at boundaries of prompts, for evicting caches.

A prefix cannot be cut out of an evicting cache, so its whole state is stored. Snapshots do not
depend on each other, so any of them may be evicted; a prompt resumes from a copy. Boundaries are
multiples of the prefill chunk, because the content of an evicting cache depends on its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxkv.errors import UserError, check_int
from jaxkv.serve.prefix.block_hash import TOKEN, BlockHasher, Hash, HashedPrompt, TokenIds, sha256
from jaxkv.serve.prefix.counts import MISS_REASONS, Counts
from jaxkv.serve.prefix.owners import Owner, Shares
from jaxkv.serve.prefix.recent import RecentSet
from jaxkv.serve.prefix.tier import Tier, Transfer

RULES = "last, branch or every=N"


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of a cache after the first `boundary` tokens of a prompt.

    hash: their hash. data: the root hash and the encoded tokens. index: its entry in `tier`.
    owner: who stored it. ready: stored, so that lookups find it. refs: its current readers.
    """

    hash: bytes
    data: bytes
    boundary: int
    index: int
    tier: Tier[Snapshot]
    owner: Owner = None
    ready: bool = False
    refs: int = 0


@dataclass(slots=True, eq=False)
class PrefillPlan:
    """Where the prefill of one prompt starts, and what it stores.

    start: tokens that need not be computed; 0 for none. snapshot: the state after them, held until
    `release`. save: boundaries at which to store a snapshot, in tokens, ascending.
    """

    prompt: HashedPrompt
    start: int
    snapshot: Snapshot | None
    save: tuple[int, ...]
    released: bool = False


class Rules(NamedTuple):
    """At which boundaries to store snapshots. every: chunks between two; 0 for none."""

    last: bool
    branch: bool
    every: int


class Snapshots:
    """Snapshots by the hash of their tokens; each owner's least recently used is evicted first.

    capacity: snapshots on the device; None for as many as are requested. chunk: tokens between
    boundaries. where: rules joined by `+`. `last`: the deepest boundary from which the same prompt
    could resume. `branch`: the deepest boundary up to which a prompt equals an earlier one.
    `every=N`: each Nth boundary. host_capacity: snapshots in the host's memory; they come from the
    device when it is full and return when they are used. history: hashes that are remembered, of
    boundaries seen, to find branch points, and of snapshots evicted, to explain misses.
    Raises UserError for unknown rules, for sizes below 1, and for a host_capacity below 0.
    """

    def __init__(
        self,
        capacity: int | None,
        chunk: int,
        where: str = "last+branch",
        host_capacity: int = 0,
        history: int = 2**18,
        hash: Hash = sha256,
    ) -> None:
        for name, value, minimum in (("capacity", capacity, 1), ("host_capacity", host_capacity, 0),
                                   ("history", history, 2)):  # fmt: skip
            if value is not None or name != "capacity":
                check_int(name, value, minimum)
        self.chain = BlockHasher(chunk, hash=hash)
        self.chunk, self.where = chunk, where
        self.counts = Counts()
        self.transfers: list[Transfer] = []
        self._rules = parse_rules(where)
        self._shares = Shares()
        self._device = Tier("device", capacity, self._shares)
        self._host = Tier("host", host_capacity, self._shares)
        self._index: dict[bytes, Snapshot] = {}
        self._seen, self._lost = RecentSet(history), RecentSet(history)
        self.held = 0  # prefill plans that read a snapshot

    @property
    def taken(self) -> int:
        """The occupied entries of the device."""
        return self._device.taken

    @property
    def host_taken(self) -> int:
        return self._host.taken

    def hash_prompt(self, tokens: TokenIds, root: bytes, owner: Owner = None) -> HashedPrompt:
        """Hash a prompt for the other methods. Raises UserError for no or invalid tokens.

        owner: who has the snapshots that are stored for it; owners have equal shares.
        """
        return self.chain.hash_prompt(tokens, root, owner=owner)

    def find(self, prompt: HashedPrompt) -> Snapshot | None:
        """The deepest snapshot of either memory from which a prompt can resume, or None.

        It leaves at least one token to compute. Nothing is changed or counted.
        """
        return next(self._ready(prompt), None)

    def get(self, hash: bytes) -> Snapshot | None:
        """The stored snapshot of this hash, in either memory."""
        snapshot = self._index.get(hash)
        return snapshot if snapshot is not None and snapshot.ready else None

    def boundaries_to_save(self, prompt: HashedPrompt, start: int = 0) -> tuple[int, ...]:
        """The boundaries after token `start` where the rules want a snapshot and none exists."""
        deepest, (last, branch, every) = (len(prompt) - 1) // self.chunk, self._rules
        numbers = set(range(every, deepest + 1, every)) if every else set()
        if last:
            numbers.add(deepest)
        if branch:
            seen = (n for n in range(deepest, 0, -1) if prompt.hashes[n - 1] in self._seen)
            numbers.add(next(seen, 0))
        return tuple(
            n * self.chunk for n in sorted(numbers)
            if n * self.chunk > start and prompt.hashes[n - 1] not in self._index
        )  # fmt: skip

    def plan_prefill(self, prompt: HashedPrompt) -> PrefillPlan:
        """Look a prompt up, hold the snapshot found, and plan the snapshots to store.

        Do the `transfers` before reading the snapshot.
        """
        self._shares.touch(prompt.owner)
        snapshot = self._on_device(prompt)
        start = 0 if snapshot is None else snapshot.boundary
        self.counts.lookups.add(len(prompt), start, self.chunk, self._missed(prompt, start))
        if snapshot is not None:
            snapshot.refs += 1
            self.held += 1
            self._device.used.touch(snapshot)
        save = self.boundaries_to_save(prompt, start)
        for hash in reversed(prompt.hashes):  # the shortest prefix, which more prompts share, last
            self._seen.add(hash)
        return PrefillPlan(prompt, start, snapshot, save)

    def release(self, plan: PrefillPlan) -> None:
        """Release a plan's snapshot; raises RuntimeError if it was released before."""
        if plan.released:
            raise RuntimeError("this plan was released before")
        plan.released = True
        if plan.snapshot is not None:
            plan.snapshot.refs -= 1
            self.held -= 1

    def claim(self, prompt: HashedPrompt, boundary: int) -> Snapshot | None:
        """Take an entry for the state after `boundary` tokens.

        Evicts a snapshot without readers if needed (owners.py). Returns None if the snapshot exists
        or no entry is available. Lookups find it after `publish`. Do the `transfers` before
        writing the entry. Raises UserError if the prompt has no such boundary.
        """
        number, rest = divmod(boundary, self.chunk)
        if rest or not 0 < number <= len(prompt.hashes):
            raise UserError(
                f"a boundary must be a multiple of {self.chunk} within the prompt, got {boundary} "
                f"of {len(prompt)}; use boundaries_to_save"
            )
        hash = prompt.hashes[number - 1]
        if hash in self._index:
            return None
        index = self._vacate(prompt.owner)
        if index is None:
            return None
        data = prompt.root + prompt.data[: boundary * TOKEN]
        snapshot = Snapshot(hash, data, boundary, index, self._device, prompt.owner)
        self._index[hash] = snapshot
        return snapshot

    def publish(self, snapshot: Snapshot) -> None:
        """Let lookups find a claimed snapshot whose state is stored."""
        snapshot.ready = True
        snapshot.tier.used.add(snapshot)

    def reset(self) -> bool:
        """Remove all snapshots, not the counts; returns False, without change, if any is used."""
        if any(snapshot.refs or not snapshot.ready for snapshot in self._index.values()):
            return False
        for snapshot in list(self._index.values()):
            self._remove(snapshot)
        self._seen.clear()
        self._lost.clear()
        self.transfers.clear()
        return True

    def _ready(self, prompt: HashedPrompt) -> Iterator[Snapshot]:
        """The snapshots from which a prompt could resume, deepest first."""
        for number in range((len(prompt) - 1) // self.chunk, 0, -1):
            snapshot = self._index.get(prompt.hashes[number - 1])
            if snapshot is not None and snapshot.ready and self._is_of(snapshot, prompt, number):
                yield snapshot

    def _is_of(self, snapshot: Snapshot, prompt: HashedPrompt, number: int) -> bool:
        """Whether it has the tokens of a prompt's first `number` chunks, not only their hash."""
        return snapshot.data == prompt.root + prompt.data[: number * self.chunk * TOKEN]

    def _on_device(self, prompt: HashedPrompt) -> Snapshot | None:
        """The deepest matching snapshot that is on the device or can be moved there."""
        for snapshot in self._ready(prompt):
            if snapshot.tier is self._device or self._promote(snapshot):
                return snapshot
        return None

    def _missed(self, prompt: HashedPrompt, start: int) -> dict[str, int]:
        """The missed tokens by reason.

        A chunk has the last reason, in the order of MISS_REASONS, of its end and all later ends.
        """
        missed = dict.fromkeys(MISS_REASONS, 0)
        missed["tail"] = len(prompt) - len(prompt.hashes) * self.chunk
        last = 0
        for number in range(len(prompt.hashes), start // self.chunk, -1):
            last = max(last, MISS_REASONS.index(self._reason(prompt, number)))
            missed[MISS_REASONS[last]] += self.chunk
        return missed

    def _reason(self, prompt: HashedPrompt, number: int) -> str:
        """Why the prompt does not resume from boundary `number`."""
        hash = prompt.hashes[number - 1]
        snapshot = self._index.get(hash)
        if snapshot is not None and snapshot.ready:
            if not self._is_of(snapshot, prompt, number):
                return "collision"
            # A usable snapshot that was not used is on the host, and all on the device are in use.
            return "last_token" if snapshot.boundary == len(prompt) else "evicted"
        if hash in self._lost:
            return "evicted"
        return "no_snapshot" if hash in self._seen else "cold"

    def _vacate(self, owner: Owner) -> int | None:
        """An empty entry of the device for an owner, if needed that of a snapshot; None if all are
        in use."""
        index = self._device.take()
        if index is not None:
            return index
        oldest = self._device.used.oldest(owner)
        if oldest is None:
            return None
        index = oldest.index
        self._demote(oldest)
        return index

    def _demote(self, snapshot: Snapshot) -> None:
        """Move a snapshot to the host, or lose it; the caller reuses its entry of the device."""
        index = self._host.take()
        if index is None and (oldest := self._host.used.oldest(snapshot.owner)) is not None:
            index = oldest.index
            self._lose(oldest)
        if index is None:
            self._lose(snapshot)
            return
        self.counts.demotions += 1
        self._transfer(snapshot, self._host, index)

    def _promote(self, snapshot: Snapshot) -> bool:
        """Move a snapshot to the device; False if every entry there is in use."""
        snapshot.refs += 1
        index = self._vacate(snapshot.owner)
        snapshot.refs -= 1
        if index is None:
            return False
        self._host.give_back(snapshot.index)
        self.counts.promotions += 1
        self._transfer(snapshot, self._device, index)
        return True

    def _transfer(self, snapshot: Snapshot, tier: Tier, index: int) -> None:
        self.transfers.append(Transfer(snapshot.tier.name, snapshot.index, tier.name, index))
        snapshot.tier.used.remove(snapshot)
        snapshot.tier, snapshot.index = tier, index
        tier.used.add(snapshot)

    def _lose(self, snapshot: Snapshot) -> None:
        """Evict a snapshot for good; the caller reuses its entry."""
        del self._index[snapshot.hash]
        snapshot.tier.used.remove(snapshot)
        self._lost.add(snapshot.hash)
        self.counts.evictions += 1

    def _remove(self, snapshot: Snapshot) -> None:
        del self._index[snapshot.hash]
        if snapshot in snapshot.tier.used:
            snapshot.tier.used.remove(snapshot)
        snapshot.tier.give_back(snapshot.index)


def parse_rules(where: str) -> Rules:
    """Parse rules such as `last+branch`. Raises UserError for an unknown rule."""
    last, branch, every = False, False, 0
    for part in where.split("+") if isinstance(where, str) else ("",):
        name, _, number = part.partition("=")
        if part == "last":
            last = True
        elif part == "branch":
            branch = True
        elif name == "every" and number.isdecimal() and int(number):
            every = int(number)
        else:
            raise UserError(f"where must be {RULES}, joined by +, got {where!r}; try last+branch")
    return Rules(last, branch, every)
