"""Whole states of caches at boundaries of prompts, for caches that a prefix cannot be cut from.

A snapshot needs no other one, so any may be evicted, and to resume from one the state is copied.
Boundaries are multiples of the chunk in which prompts are read: what a cache that evicts holds
depends on where its chunks end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxkv.errors import UserError, whole
from jaxkv.prefix.counts import REASONS, Counts
from jaxkv.prefix.keys import TOKEN, Chain, Hash, Prompt, Tokens, sha256
from jaxkv.prefix.recent import Recent
from jaxkv.prefix.tier import Move, Tier

RULES = "last, junction, branch (junctions alone) or every=N"


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of a cache that has absorbed the first `boundary` tokens of some prompt.

    key: of those tokens; data: the root, and they themselves as encoded. slot: where it is, in
    `tier`. ready: computed and stored; one that is not can be found by nobody. refs: its readers.
    """

    key: bytes
    data: bytes
    boundary: int
    slot: int
    tier: Tier[Snapshot]
    ready: bool = False
    refs: int = 0


@dataclass(slots=True, eq=False)
class Visit:
    """One prompt that is being read.

    at: tokens that need not be computed, 0 for none; they are in `snapshot`, which is held until
    `leave`. save: boundaries at which to store a snapshot, in tokens, nearest first.
    """

    prompt: Prompt
    at: int
    snapshot: Snapshot | None
    save: tuple[int, ...]
    left: bool = False


class Where(NamedTuple):
    """At which boundaries snapshots are stored. every: chunks between two, 0 for no grid."""

    last: bool
    junction: bool
    every: int


class Snapshots:
    """Snapshots by what they have absorbed.

    slots: on the device, None for as many as are asked for. chunk: tokens between boundaries.
    where: rules joined by `+`. `last` is the deepest boundary that the same prompt could resume
    from; `junction` the deepest up to which a prompt is like one seen before; `every=N` each Nth
    boundary; `branch` is `junction`. host_slots: what the device has no more room for goes there,
    and comes back when it is used. memory: keys of boundaries seen, for junctions, and of
    snapshots lost, to tell why something was missed; the newest stay.
    Raises UserError for rules that do not exist, and for sizes below 1, of host_slots below 0.
    """

    def __init__(
        self,
        slots: int | None,
        chunk: int,
        where: str = "last+junction",
        host_slots: int = 0,
        memory: int = 2**18,
        hash: Hash = sha256,
    ) -> None:
        for name, value, least in (("slots", slots, 1), ("host_slots", host_slots, 0),
                                   ("memory", memory, 2)):  # fmt: skip
            if value is not None or name != "slots":
                whole(name, value, least)
        self.chain = Chain(chunk, hash=hash)
        self.chunk, self.where = chunk, where
        self.counts = Counts()
        self.moves: list[Move] = []
        self._rules = rules(where)
        self._device, self._host = Tier("device", slots), Tier("host", host_slots)
        self._index: dict[bytes, Snapshot] = {}
        self._seen, self._lost = Recent(memory), Recent(memory)
        self.held = 0  # visits that read a snapshot

    @property
    def taken(self) -> int:
        """Slots of the device that are not free."""
        return self._device.taken

    @property
    def host_taken(self) -> int:
        return self._host.taken

    def read(self, tokens: Tokens, root: bytes) -> Prompt:
        """A prompt with its keys, for `find`, `plan` and `visit`."""
        return self.chain.read(tokens, root)

    def find(self, prompt: Prompt) -> Snapshot | None:
        """The deepest snapshot that a prompt can resume from, on the device or on the host.

        It leaves at least one token to be computed; nothing is changed or counted.
        """
        return next(self._ready(prompt), None)

    def plan(self, prompt: Prompt, at: int = 0) -> tuple[int, ...]:
        """Boundaries behind token `at` where a snapshot is to be stored and there is none."""
        deepest, (last, junction, every) = (len(prompt) - 1) // self.chunk, self._rules
        wanted = set(range(every, deepest + 1, every)) if every else set()
        if last:
            wanted.add(deepest)
        if junction:
            seen = (n for n in range(deepest, 0, -1) if prompt.keys[n - 1] in self._seen)
            wanted.add(next(seen, 0))
        return tuple(
            n * self.chunk for n in sorted(wanted)
            if n * self.chunk > at and prompt.keys[n - 1] not in self._index
        )  # fmt: skip

    def visit(self, prompt: Prompt, resumed: bool = False) -> Visit:
        """Look a prompt up, hold what was found, and say what to store on the way.

        resumed: it was visited before; its figures are counted apart. Mind `moves` before anything
        is read.
        """
        found = self._on_device(prompt)
        at = 0 if found is None else found.boundary
        counts = self.counts.resumed if resumed else self.counts.first
        counts.add(len(prompt), at, self.chunk, self._missed(prompt, at))
        if found is not None:
            self._hold(found)
            self._device.used.move_to_end(found)
        save = self.plan(prompt, at)
        for key in reversed(prompt.keys):  # those that more prompts share last
            self._seen.add(key)
        return Visit(prompt, at, found, save)

    def hold(self, prompt: Prompt) -> Visit:
        """Keep the deepest snapshot that the device can hold of a prompt there, until `leave`.

        No lookup is counted. Mind `moves` before anything is read.
        """
        found = self._on_device(prompt)
        if found is None:
            return Visit(prompt, 0, None, ())
        self._hold(found)
        return Visit(prompt, found.boundary, found, ())

    def _hold(self, snapshot: Snapshot) -> None:
        snapshot.refs += 1
        self.held += 1

    def leave(self, visit: Visit) -> None:
        """End a visit; raises RuntimeError where it was ended before."""
        if visit.left:
            raise RuntimeError("this visit was left before")
        visit.left = True
        if visit.snapshot is not None:
            visit.snapshot.refs -= 1
            self.held -= 1

    def claim(self, prompt: Prompt, boundary: int) -> Snapshot | None:
        """A slot for the state after so many tokens; None where it is there, or no slot is.

        The oldest that nobody reads makes room. Nobody finds it until `publish`; `abandon` gives
        it up. Mind `moves` before the slot is written.
        Raises UserError for what is no boundary of the prompt.
        """
        number, rest = divmod(boundary, self.chunk)
        if rest or not 0 < number <= len(prompt.keys):
            raise UserError(
                f"a boundary must be a multiple of {self.chunk} within the prompt, got {boundary} "
                f"of {len(prompt)}; take those of plan"
            )
        key = prompt.keys[number - 1]
        if key in self._index:
            return None
        slot = self._vacate()
        if slot is None:
            return None
        data = prompt.root + prompt.data[: boundary * TOKEN]
        snapshot = self._index[key] = Snapshot(key, data, boundary, slot, self._device)
        return snapshot

    def publish(self, snapshot: Snapshot) -> None:
        """From now on it can be found."""
        snapshot.ready = True
        snapshot.tier.used[snapshot] = None

    def abandon(self, snapshot: Snapshot) -> None:
        """Give up a claim that was not published."""
        if snapshot.ready:
            raise RuntimeError("a published snapshot cannot be abandoned; drop it")
        self._remove(snapshot)

    def drop(self, key: bytes) -> bool:
        """Forget a snapshot by force; False where there is none or somebody reads or writes it."""
        snapshot = self._index.get(key)
        if snapshot is None or snapshot.refs or not snapshot.ready:
            return False
        self._remove(snapshot)
        self._lost.add(key)
        return True

    def reset(self) -> bool:
        """Forget everything but the figures; False, and nothing is done, while any is in use."""
        if any(snapshot.refs or not snapshot.ready for snapshot in self._index.values()):
            return False
        for snapshot in list(self._index.values()):
            self._remove(snapshot)
        self._seen.clear()
        self._lost.clear()
        self.moves.clear()
        return True

    def _ready(self, prompt: Prompt) -> Iterator[Snapshot]:
        """The snapshots that a prompt could resume from, deepest first."""
        for number in range((len(prompt) - 1) // self.chunk, 0, -1):
            snapshot = self._index.get(prompt.keys[number - 1])
            if snapshot is not None and snapshot.ready and self._is(snapshot, prompt, number):
                yield snapshot

    def _is(self, snapshot: Snapshot, prompt: Prompt, number: int) -> bool:
        """Whether it is of the first `number` chunks of a prompt, and has not just their key."""
        return snapshot.data == prompt.root + prompt.data[: number * self.chunk * TOKEN]

    def _on_device(self, prompt: Prompt) -> Snapshot | None:
        """The deepest of them that is on the device, or can be brought there."""
        for snapshot in self._ready(prompt):
            if snapshot.tier is self._device or self._promote(snapshot):
                return snapshot
        return None

    def _missed(self, prompt: Prompt, at: int) -> dict[str, int]:
        """Tokens by the reason why they are missed.

        Of a chunk it is the best of what was found out at its end and at all boundaries behind.
        """
        missed = dict.fromkeys(REASONS, 0)
        missed["tail"] = len(prompt) - len(prompt.keys) * self.chunk
        best = 0
        for number in range(len(prompt.keys), at // self.chunk, -1):
            best = max(best, REASONS.index(self._reason(prompt, number)))
            missed[REASONS[best]] += self.chunk
        return missed

    def _reason(self, prompt: Prompt, number: int) -> str:
        """Why nothing was resumed from this boundary."""
        key = prompt.keys[number - 1]
        snapshot = self._index.get(key)
        if snapshot is not None and snapshot.ready:
            if not self._is(snapshot, prompt, number):
                return "collision"
            # One that could be used and was not is on the host, and the device full of readers.
            return "last_token" if snapshot.boundary == len(prompt) else "evicted"
        if key in self._lost:
            return "evicted"
        return "no_snapshot" if key in self._seen else "cold"

    def _vacate(self) -> int | None:
        """A free slot of the device, where need be that of the oldest snapshot there."""
        slot = self._device.take()
        if slot is not None:
            return slot
        oldest = self._device.oldest()
        if oldest is None:
            return None
        slot = oldest.slot
        self._demote(oldest)
        return slot

    def _demote(self, snapshot: Snapshot) -> None:
        """Move a snapshot to the host; where it has no room it is lost. Its slot is not given."""
        slot = self._host.take()
        if slot is None and (oldest := self._host.oldest()) is not None:
            slot = oldest.slot
            self._lose(oldest)
        if slot is None:
            self._lose(snapshot)
            return
        self.counts.demotions += 1
        self._move(snapshot, self._host, slot)

    def _promote(self, snapshot: Snapshot) -> bool:
        """Move a snapshot to the device; False where all that is there is in use."""
        snapshot.refs += 1
        slot = self._vacate()
        snapshot.refs -= 1
        if slot is None:
            return False
        self._host.give(snapshot.slot)
        self.counts.promotions += 1
        self._move(snapshot, self._device, slot)
        return True

    def _move(self, snapshot: Snapshot, tier: Tier, slot: int) -> None:
        self.moves.append(Move(snapshot.tier.name, snapshot.slot, tier.name, slot))
        del snapshot.tier.used[snapshot]
        snapshot.tier, snapshot.slot = tier, slot
        tier.used[snapshot] = None

    def _lose(self, snapshot: Snapshot) -> None:
        """Evict a snapshot for good; its slot is not given."""
        del self._index[snapshot.key], snapshot.tier.used[snapshot]
        self._lost.add(snapshot.key)
        self.counts.evictions += 1

    def _remove(self, snapshot: Snapshot) -> None:
        del self._index[snapshot.key]
        snapshot.tier.used.pop(snapshot, None)
        snapshot.tier.give(snapshot.slot)


def rules(where: str) -> Where:
    """What a string such as `last+junction` says.

    Raises UserError for a part that is no rule.
    """
    last, junction, every = False, False, 0
    for part in where.split("+") if isinstance(where, str) else ("",):
        name, _, number = part.partition("=")
        if part == "last":
            last = True
        elif part in ("junction", "branch"):
            junction = True
        elif name == "every" and number.isdecimal() and int(number):
            every = int(number)
        else:
            raise UserError(f"where must be {RULES}, joined by +, got {where!r}; try last+junction")
    return Where(last, junction, every)
