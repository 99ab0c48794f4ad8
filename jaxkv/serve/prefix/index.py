"""The index of cached prefixes: an entry for each hash, on a list of tiers.

An append-only cache can be cut at any chunk, so an entry is the block of one chunk and has the
block before it as its parent. A prefix cannot be cut out of an evicting cache, so an entry is a
snapshot of the state at a boundary, without a parent. Boundaries are multiples of the prefill
chunk, because the content of an evicting cache depends on its chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

from jaxkv.errors import UserError, check_int
from jaxkv.serve.prefix.block_hash import TOKEN, BlockHasher, Hash, HashedPrompt, TokenIds, sha256
from jaxkv.serve.prefix.owners import FairLRU, Owner, Shares

RULES = "last, branch or every=N"

# Why a prompt token was missed. Each token has one reason: the last in this order that applies.
MISS_REASONS = (
    "cold",  # no equal prefix was seen
    "tail",  # it belongs to no full chunk, and partial ones are not stored
    "no_snapshot",  # its prefix was seen, but no state was stored there
    "evicted",  # it was cached before
    "collision",  # another prefix has the same hash
    "last_token",  # it is cached, but the last token must be computed to get logits
)


@dataclass(slots=True)
class Counts:
    """Statistics of an index since its creation.

    tokens, tokens_hit: tokens of all prompts, and those that were cached. missed: the others by
    reason. evictions: entries that were lost. demotions, promotions: entries that moved to the next
    tier, and back to the device.
    """

    tokens: int = 0
    tokens_hit: int = 0
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))
    evictions: int = 0
    demotions: int = 0
    promotions: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """A block, or the snapshot of a state.

    hash: of all tokens up to its end. data: the bytes that the hash stands for, which lookups
    compare. boundary: tokens up to its end. parent: the block before a block. owner: whose share it
    takes; blocks after one first block have one owner, so that no block is evicted before its
    children. index: its place in the tier `level`. ready: stored, so that lookups find it. refs:
    its current readers and writers.
    """

    hash: bytes
    data: bytes
    boundary: int
    parent: Entry | None
    owner: Owner
    index: int
    level: int = 0
    ready: bool = False
    refs: int = 1


@dataclass(slots=True, eq=False)
class Lease:
    """The cached beginning of one prompt, on the device until `release`.

    entries: its blocks in order, or its snapshot. start: tokens that need not be computed. save:
    boundaries at which to store an entry, in tokens, ascending.
    """

    prompt: HashedPrompt
    entries: list[Entry]
    start: int = 0
    save: Sequence[int] = ()
    released: bool = False


class Tier:
    """The places of one memory by number.

    capacity: number of places; None for as many as are taken. lru: the entries in them.
    """

    def __init__(self, capacity: int | None, shares: Shares) -> None:
        self.capacity = capacity
        self.lru: FairLRU[Entry] = FairLRU(shares)
        self._free: list[int] = []
        self._made = 0

    def take(self) -> int | None:
        """The number of an empty place, or None if there is none."""
        if self._free:
            return self._free.pop()
        if self._made == self.capacity:
            return None
        self._made += 1
        return self._made - 1

    def remove(self, entry: Entry) -> None:
        """Empty the place of an entry."""
        self.lru.remove(entry)
        self._free.append(entry.index)

    @property
    def taken(self) -> int:
        """The number of places that are not empty."""
        return self._made - len(self._free)


class PrefixIndex:
    """Entries by hash; the least recently used is evicted first, by the shares of owners.py.

    chunk: tokens between boundaries.
    capacities: places of each tier, the device first; None for as many as are requested. An entry
      that leaves a full tier moves to the next one, and returns to the device when it is used.
    linked: entries are blocks with parents; otherwise they are snapshots.
    where: at which boundaries to store snapshots, joined by `+`. `last`: the deepest from which the
      same prompt could resume. `branch`: the deepest up to which a prompt equals an earlier one.
      `every=N`: each Nth boundary. Blocks are stored at every boundary.
    history: hashes that are remembered, of boundaries seen, to find branch points, and of entries
      evicted, to explain misses.
    hash: a hash function of bytes.
    move: called with the old tier and place of an entry and the new ones, before another entry may
      be written to the old place.
    Raises UserError for unknown rules, a device or chunk below 1, and other tiers below 0.
    """

    def __init__(
        self,
        chunk: int,
        capacities: Sequence[int | None],
        *,
        linked: bool = False,
        where: str = "last+branch",
        history: int = 2**18,
        hash: Hash = sha256,
        move: Callable[[int, int, int, int], None] = lambda *_: None,
    ) -> None:
        for level, capacity in enumerate(capacities):
            if capacity is not None:
                check_int("capacity", capacity, 0 if level else 1)
        check_int("history", history, 2)
        self.chain = BlockHasher(chunk, hash)
        self.chunk, self.linked = chunk, linked
        self.counts = Counts()
        self.in_use = 0  # entries with readers or writers
        self._rules, self._move = parse_rules(where), move
        self._capacities, self._shares = tuple(capacities), Shares()
        self._seen, self._lost = RecentSet(history), RecentSet(history)
        self._clear()

    def _clear(self) -> None:
        self.tiers = [Tier(capacity, self._shares) for capacity in self._capacities]
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def hash_prompt(self, tokens: TokenIds, root: bytes, owner: Owner = None) -> HashedPrompt:
        """Hash a prompt for the other methods. Raises UserError for no or invalid tokens.

        owner: who has the entries that are stored for it; owners have equal shares.
        """
        return self.chain.hash_prompt(tokens, root, owner)

    def get(self, hash: bytes) -> Entry | None:
        """The stored entry of this hash, in any tier."""
        entry = self._entries.get(hash)
        return entry if entry is not None and entry.ready else None

    def hashed_bytes(self, prompt: HashedPrompt, number: int) -> bytes:
        """What the hash of the first `number` chunks stands for.

        A block: the hash before it, and its tokens. A snapshot: the root and all tokens.
        """
        if not self.linked:
            return prompt.root + prompt.data[: number * self.chunk * TOKEN]
        parent = prompt.hashes[number - 2] if number > 1 else prompt.root
        return parent + prompt.blocks[number - 1]

    def matches(self, prompt: HashedPrompt) -> Iterator[Entry]:
        """The entries of a prompt before its last token: blocks in order, snapshots deepest first.

        Nothing is changed or counted.
        """
        deepest, parent = (len(prompt) - 1) // self.chunk, None
        for number in range(1, deepest + 1) if self.linked else range(deepest, 0, -1):
            entry = self.get(prompt.hashes[number - 1])
            if entry is not None and self._is_of(entry, prompt, number, parent):
                yield entry
                parent = entry if self.linked else None
            elif self.linked:
                return

    def hold(self, prompt: HashedPrompt) -> Lease:
        """Look a prompt up and hold its blocks, or its deepest snapshot, on the device."""
        self._shares.touch(prompt.owner)
        if self.linked:
            blocks = list(self.matches(prompt))
            self._add_refs(blocks, 1)
            entries = list(takewhile(self._on_device, blocks))
            self._add_refs(blocks[len(entries) :], -1)
        else:
            snapshots = filter(self._on_device, self.matches(prompt))
            entries = list(islice(snapshots, 1))
            self._add_refs(entries, 1)
        self._touch(entries)
        return Lease(prompt, entries)

    def start(self, lease: Lease) -> None:
        """Count a lookup, and plan what to store, by the entries that a lease holds."""
        prompt, counts = lease.prompt, self.counts
        lease.start = lease.entries[-1].boundary if lease.entries else 0
        counts.tokens += len(prompt)
        counts.tokens_hit += lease.start
        self._count_missed(prompt, lease.start)
        lease.save = self.boundaries_to_save(prompt, lease.start)
        for hash in () if self.linked else reversed(prompt.hashes):
            self._seen.add(hash)  # the shortest prefix, which more prompts share, last

    def boundaries_to_save(self, prompt: HashedPrompt, start: int) -> Sequence[int]:
        """The boundaries after token `start` where the rules want an entry."""
        if self.linked:
            return range(start + self.chunk, len(prompt) + 1, self.chunk)
        deepest, (last, branch, every) = (len(prompt) - 1) // self.chunk, self._rules
        numbers = set(range(every, deepest + 1, every)) if every else set()
        if last:
            numbers.add(deepest)
        if branch:
            seen = (n for n in range(deepest, 0, -1) if prompt.hashes[n - 1] in self._seen)
            numbers.add(next(seen, 0))
        return tuple(
            n * self.chunk
            for n in sorted(numbers)
            if n * self.chunk > start and prompt.hashes[n - 1] not in self._entries
        )

    def release(self, lease: Lease) -> None:
        """Release a lease; raises RuntimeError if it was released before."""
        if lease.released:
            raise RuntimeError("this lease was released before")
        lease.released = True
        self._add_refs(lease.entries, -1)
        if self.linked:
            self._touch(lease.entries)

    def claim(self, prompt: HashedPrompt, at: int, lease: Lease | None = None) -> Entry | None:
        """Take a place on the device for the entry that ends at token `at`.

        lease: that of the blocks before it; required for blocks. Returns None if no place is
        available, if blocks before it are missing, or if the entry exists; the lease then holds the
        entry that exists. Lookups find a new entry after `publish`.
        Raises UserError if the prompt has no such boundary.
        """
        number, rest = divmod(at, self.chunk)
        if rest or not 0 < number <= len(prompt.hashes):
            raise UserError(
                f"a boundary must be a multiple of {self.chunk} within the prompt, got {at} of "
                f"{len(prompt)}; use boundaries_to_save"
            )
        blocks = [] if lease is None else lease.entries
        if self.linked and len(blocks) != number - 1:
            return None
        parent = blocks[-1] if self.linked and blocks else None
        hash = prompt.hashes[number - 1]
        if hash in self._entries:
            entry = self.get(hash) if self.linked else None
            same = entry is not None and self._is_of(entry, prompt, number, parent)
            if same and self._on_device(entry):
                self._add_refs([entry], 1)
                blocks.append(entry)
            return None
        owner = prompt.owner if parent is None else parent.owner
        index = self._free_place(0, owner)
        if index is None:
            return None
        data = self.hashed_bytes(prompt, number)
        entry = self._entries[hash] = Entry(hash, data, at, parent, owner, index)
        self.tiers[0].lru.add(entry)
        self.in_use += 1
        return entry

    def publish(self, entry: Entry, lease: Lease | None = None) -> None:
        """Let lookups find a claimed entry whose content is stored. lease: holds a block."""
        entry.ready = True
        if self.linked:
            lease.entries.append(entry)
        else:
            self._add_refs([entry], -1)

    def withdraw(self, entry: Entry) -> None:
        """Give the place of a claimed entry back, because there is nothing to store in it."""
        del self._entries[entry.hash]
        self.tiers[entry.level].remove(entry)
        self.in_use -= 1

    def reset(self) -> bool:
        """Remove all entries, not the counts; returns False, without change, if any is used."""
        if self.in_use:
            return False
        self._clear()
        self._seen.clear()
        self._lost.clear()
        return True

    def _is_of(self, entry: Entry, prompt: HashedPrompt, number: int, parent: Entry | None) -> bool:
        """Whether an entry has the tokens of the first `number` chunks, and not only their hash."""
        return entry.parent is parent and entry.data == self.hashed_bytes(prompt, number)

    def _add_refs(self, entries: Sequence[Entry], count: int) -> None:
        for entry in entries:
            was_used = entry.refs > 0
            entry.refs += count
            self.in_use += (entry.refs > 0) - was_used

    def _touch(self, entries: Sequence[Entry]) -> None:
        """Mark entries as used, the first last, so that a tail is evicted before its head."""
        for entry in reversed(entries):
            self.tiers[entry.level].lru.touch(entry)

    def _on_device(self, entry: Entry) -> bool:
        """Move an entry to the device; False if no place there is available."""
        if not entry.level:
            return True
        entry.refs += 1
        index = self._free_place(0, entry.owner)
        entry.refs -= 1
        if index is None:
            return False
        self.counts.promotions += 1
        self.tiers[entry.level].remove(entry)
        self._place(entry, 0, index)
        return True

    def _free_place(self, level: int, owner: Owner) -> int | None:
        """A free place of a tier for an owner; a full tier demotes an entry to free its place.

        None if all entries that may move are in use.
        """
        tier = self.tiers[level]
        index = tier.take()
        if index is None and (entry := tier.lru.oldest(owner)) is not None:
            index = entry.index
            self._demote(entry)
        return index

    def _demote(self, entry: Entry) -> None:
        """Move an entry to the next tier, or lose it; the caller reuses its place."""
        level = entry.level + 1
        index = self._free_place(level, entry.owner) if level < len(self.tiers) else None
        self.tiers[entry.level].lru.remove(entry)
        if index is None:
            del self._entries[entry.hash]
            self._lost.add(entry.hash)
            self.counts.evictions += 1
        else:
            self.counts.demotions += 1
            self._place(entry, level, index)

    def _place(self, entry: Entry, level: int, index: int) -> None:
        self._move(entry.level, entry.index, level, index)
        entry.level, entry.index = level, index
        self.tiers[level].lru.add(entry)

    def _count_missed(self, prompt: HashedPrompt, start: int) -> None:
        """Count the missed tokens by reason.

        A snapshot at a later boundary would have covered a chunk too. So with snapshots its reason
        is the last, in order of MISS_REASONS, of those of its own boundary and all later ones.
        """
        missed, rank = self.counts.missed, 0
        missed["tail"] += len(prompt) - len(prompt.hashes) * self.chunk
        for number in range(len(prompt.hashes), start // self.chunk, -1):
            reason = MISS_REASONS.index(self._reason(prompt, number))
            rank = reason if self.linked else max(rank, reason)
            missed[MISS_REASONS[rank]] += self.chunk

    def _reason(self, prompt: HashedPrompt, number: int) -> str:
        """Why the prompt does not resume from boundary `number`."""
        hash = prompt.hashes[number - 1]
        entry = self.get(hash)
        if entry is not None:
            if entry.data != self.hashed_bytes(prompt, number):
                return "collision"
            # A usable entry that was not used follows an evicted one, or is not on the device.
            return "last_token" if entry.boundary == len(prompt) else "evicted"
        if hash in self._lost:
            return "evicted"
        return "no_snapshot" if hash in self._seen else "cold"


class RecentSet:
    """A set of at most `size` hashes, at least two. The newest half always stays."""

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self.clear()

    def add(self, hash: bytes) -> None:
        """Insert a hash as the newest, also if it is in the set already."""
        self._new.add(hash)
        if len(self._new) == self._half:
            self._old, self._new = self._new, set()

    def clear(self) -> None:
        self._old: set[bytes] = set()
        self._new: set[bytes] = set()

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._new or hash in self._old


class Rules(NamedTuple):
    """At which boundaries to store snapshots. every: chunks between two; 0 for none."""

    last: bool
    branch: bool
    every: int


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
