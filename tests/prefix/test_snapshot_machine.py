"""Whatever is done to snapshots in whatever order, with two memories and pages that states share.

Slots have contents here: the tokens that were absorbed. A page's content is what a level of
balance-stream depends on: the tokens up to the one with which it was written.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxkv
from jaxkv.engine.host import Host, move
from jaxkv.engine.pool import pages_of
from jaxkv.engine.store import SharedPages, page_names
from jaxkv.prefix import Snapshots, encode
from jaxkv.prefix.keys import sha256
from tests.prefix.test_machine import PICK, ROOTS, run

WHERE = ("last+junction", "last", "every=1", "every=2+last", "branch")
PAGES_OF = pages_of(jaxkv.policy("balance-stream:sinks=1,window=2,levels=3,block=2"))
PAGES = len(PAGES_OF.last_write(0))


class Memory(Host):
    """The host's slots, for what is no array."""

    def __init__(self):
        self.held = {}

    def put(self, slot, content, names):
        self.held[slot] = content, names

    def take(self, slot):
        return self.held.pop(slot)


class Machine(RuleBasedStateMachine):
    hash = staticmethod(sha256)
    steps = 0

    @initialize(data=st.data())
    def begin(self, data):
        draw = data.draw
        self.chunk = draw(st.sampled_from([1, 2, 3]))
        self.slots = draw(st.sampled_from([None, 1, 2, 3, 6]))
        self.host_slots = draw(st.sampled_from([0, 0, 1, 2, 8])) if self.slots else 0
        self.index = Snapshots(
            self.slots, self.chunk, draw(st.sampled_from(WHERE)), self.host_slots, hash=self.hash
        )
        self.pages = SharedPages(PAGES * (self.slots or 99))
        self.device, self.far, self.written = {}, Memory(), {}
        self.visits, self.claims = [], []
        self.said = [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 0], [7] * 9]  # that others begin with
        self.queried = 0

    def move(self):
        move(self.index.moves, self.far, self.take, self.save)

    def take(self, slot):
        self.check(slot)
        return self.device.pop(slot), self.pages.names(slot)

    def save(self, slot, content, names):
        """As the engine does: pages that nobody has are written, the others are not."""
        self.pages.release(slot)
        salt, tokens = content
        last = PAGES_OF.last_write(len(tokens))
        for number, page in self.pages.take(slot, names):
            self.written[page] = (salt, tokens[: last[number]], number)
        self.device[slot] = content

    def check(self, slot):
        """What is in a slot and in its pages is what its tokens make."""
        salt, tokens = self.device[slot]
        for number, (page, last) in enumerate(
            zip(self.pages.of(slot), PAGES_OF.last_write(len(tokens)), strict=True)
        ):
            assert self.written[page] == (salt, tokens[:last], number)

    @precondition(lambda self: len(self.visits) < 4)
    @rule(salt=st.sampled_from([0, 0, 0, 1]), like=PICK, keep=st.sampled_from([99, 99, 9, 6, 4]),
          new=st.lists(st.sampled_from([0, 1]), max_size=5))  # fmt: skip
    def visit(self, salt, like, keep, new):
        tokens = (*self.said[like % len(self.said)][:keep], *new)
        self.said = [*self.said[-6:], tokens]
        prompt = self.index.read(tokens, ROOTS[salt])
        deepest, planned = self.index.find(prompt), self.usable(ROOTS[salt], tokens)
        if self.hash is sha256:
            assert (deepest.boundary if deepest else 0) == planned
        visit = self.index.visit(prompt)
        self.move()
        self.queried += len(tokens)
        assert visit.at < len(tokens) and visit.at % self.chunk == 0
        readers = sum(one.snapshot is not None for one, *_ in self.visits)
        if self.hash is sha256 and (self.slots is None or readers + len(self.claims) < self.slots):
            assert visit.at == planned, "a slot could be had"
        if visit.at:
            assert self.device[visit.snapshot.slot] == (ROOTS[salt], tokens[: visit.at])
            self.check(visit.snapshot.slot)
        assert list(visit.save) == sorted(set(visit.save))
        assert all(boundary > visit.at for boundary in visit.save)
        self.visits.append((visit, tokens, ROOTS[salt]))

    def usable(self, salt, tokens):
        """The deepest boundary with a snapshot that leaves a token."""
        there = {
            (s.data, s.key) for s in self.index._index.values() if s.ready
        }  # fmt: skip
        prompt = self.index.read(tokens, salt)
        ends = range((len(tokens) - 1) // self.chunk, 0, -1)
        keys = ((salt + encode(tokens[: n * self.chunk]), prompt.keys[n - 1], n) for n in ends)
        return next((n * self.chunk for data, key, n in keys if (data, key) in there), 0)

    @precondition(lambda self: self.visits and len(self.claims) < 3)
    @rule(pick=PICK, which=PICK, anywhere=st.booleans())
    def claim(self, pick, which, anywhere):
        visit, tokens, salt = self.visits[pick % len(self.visits)]
        ends = range(self.chunk, len(tokens) + 1, self.chunk) if anywhere else visit.save
        if not ends:
            return
        boundary = ends[which % len(ends)]
        snapshot = self.index.claim(visit.prompt, boundary)
        self.move()
        if snapshot is not None:
            self.claims.append((snapshot, visit.prompt, salt, tuple(tokens[:boundary])))

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, keep=st.sampled_from([True, True, True, False]))
    def settle(self, pick, keep):
        snapshot, prompt, salt, tokens = self.claims.pop(pick % len(self.claims))
        if not keep:
            self.index.abandon(snapshot)
            return
        names = page_names(PAGES_OF, self.chunk, prompt, len(tokens))
        self.save(snapshot.slot, (salt, tokens), names)
        self.index.publish(snapshot)

    @precondition(lambda self: self.visits)
    @rule(pick=PICK)
    def leave(self, pick):
        visit, *_ = self.visits.pop(pick % len(self.visits))
        self.index.leave(visit)
        with pytest.raises(RuntimeError):
            self.index.leave(visit)

    @rule(like=PICK, salt=st.sampled_from(ROOTS))
    def hold(self, like, salt):
        tokens = tuple(self.said[like % len(self.said)])
        if len(self.visits) < 4:
            visit = self.index.hold(self.index.read(tokens, salt))
            self.move()
            assert visit.save == () and (not visit.at or visit.snapshot.tier.name == "device")
            self.visits.append((visit, tokens, salt))

    @rule(like=PICK, number=PICK, salt=st.sampled_from(ROOTS))
    def drop(self, like, number, salt):
        keys = self.index.read(self.said[like % len(self.said)], salt).keys
        snapshot = self.index._index.get(keys[number % len(keys)]) if keys else None
        if snapshot is not None:
            idle = snapshot.ready and not snapshot.refs
            assert self.index.drop(snapshot.key) == idle
            if idle and snapshot.tier.name == "host":
                del self.far.held[snapshot.slot]  # the engine's is written over

    @precondition(lambda self: self.index.taken > 2)
    @rule()
    def reset(self):
        busy = any(visit.snapshot is not None for visit, *_ in self.visits) or self.claims
        assert self.index.reset() != bool(busy)
        if not busy:
            assert self.index.taken == self.index.host_taken == 0
            self.pages.clear()
            self.device.clear()
            self.far.held.clear()

    @invariant()
    def add_up(self):
        type(self).steps += 1
        index, found = self.index, self.index.counts.first
        assert found.tokens == self.queried == found.tokens_hit + sum(found.missed.values())
        snapshots = list(index._index.values())
        by_tier = Counter(snapshot.tier.name for snapshot in snapshots)
        assert (by_tier["device"], by_tier["host"]) == (index.taken, index.host_taken)
        assert self.slots is None or index.taken <= self.slots
        assert index.host_taken <= self.host_slots
        places = {(snapshot.tier.name, snapshot.slot) for snapshot in snapshots}
        assert len(places) == len(snapshots), "two in one slot"
        readers = Counter(visit.snapshot for visit, *_ in self.visits if visit.snapshot)
        assert all(snapshot.refs == readers[snapshot] for snapshot in snapshots)
        assert set(readers) <= set(snapshots), "one that is read is there"
        assert not index.moves

    @invariant()
    def what_is_found_is_there(self):
        for snapshot in self.index._index.values():
            if not snapshot.ready:
                continue
            at, slot = snapshot.tier.name, snapshot.slot
            salt, tokens = self.device[slot] if at == "device" else self.far.held[slot][0]
            assert snapshot.data == salt + encode(tokens) and len(tokens) == snapshot.boundary
            assert self.index.read(tokens, salt).keys[-1] == snapshot.key
            if at == "device":
                self.check(slot)


class Colliding(Machine):
    """Sixteen keys in all: they are often those of something else."""

    hash = staticmethod(lambda data: bytes([sha256(data)[0] % 16]))


@pytest.mark.parametrize("kind, examples", [(Machine, 80), (Colliding, 40)])
def test_whatever_is_done_to_snapshots(kind, examples):
    run(kind, examples)
    assert kind.steps >= 20 * examples


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Machine, Colliding])
def test_whatever_is_done_to_snapshots_for_long(kind):
    run(kind, 500)
    assert kind.steps >= 10_000
