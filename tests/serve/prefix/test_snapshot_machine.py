"""Random operations on snapshots in random order, with device and host memory and shared pages.

Here each snapshot contains the tokens that its state has read. Each page contains the tokens up to
the one that wrote it, because a level of balance-stream depends on no others.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxkv
from jaxkv.serve.engine.pool import pages_of
from jaxkv.serve.engine.tiers import SharedPages, page_ids
from jaxkv.serve.prefix import encode
from jaxkv.serve.prefix.block_hash import sha256
from tests.serve.prefix.prompts import cached, drop, snapshots
from tests.serve.prefix.test_machine import PICK, ROOTS, run

WHERE = ("last+branch", "last", "every=1", "every=2+last", "branch")
REWRITTEN = pages_of(jaxkv.policy("balance-stream:sinks=1,window=2,levels=3,block=2"))
PAGES = len(REWRITTEN.last_write(0))


class Machine(RuleBasedStateMachine):
    hash = staticmethod(sha256)
    steps = 0

    @initialize(data=st.data())
    def begin(self, data):
        draw = data.draw
        self.chunk = draw(st.sampled_from([1, 2, 3]))
        self.capacity = draw(st.sampled_from([None, 1, 2, 3, 6]))
        self.host_capacity = draw(st.sampled_from([0, 0, 1, 2, 8])) if self.capacity else 0
        self.index = snapshots(
            self.capacity, self.chunk, draw(st.sampled_from(WHERE)), self.host_capacity,
            hash=self.hash, move=self.move,
        )  # fmt: skip
        self.pages = SharedPages(PAGES * (self.capacity or 99))
        self.device, self.host, self.written = {}, {}, {}
        self.plans, self.claims = [], []
        # Later prompts begin like earlier ones.
        self.prompts = [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 0], [7] * 9]
        self.queried = 0

    def move(self, level, place, new_level, new_place):
        if new_level:
            self.check(place)
            self.host[new_place] = self.device.pop(place), self.pages.ids(place)
        else:
            self.save(new_place, *self.host.pop(place))

    def save(self, entry, content, ids):
        """As in the engine, write only the pages that no snapshot has yet."""
        self.pages.release(entry)
        salt, tokens = content
        last = REWRITTEN.last_write(len(tokens))
        for number, page in self.pages.take(entry, ids):
            self.written[page] = (salt, tokens[: last[number]], number)
        self.device[entry] = content

    def check(self, entry):
        """Check that the pages of an entry belong to its tokens."""
        salt, tokens = self.device[entry]
        for number, (page, last) in enumerate(
            zip(self.pages.table(entry), REWRITTEN.last_write(len(tokens)), strict=True)
        ):
            assert self.written[page] == (salt, tokens[:last], number)

    @precondition(lambda self: len(self.plans) < 4)
    @rule(salt=st.sampled_from([0, 0, 0, 1]), like=PICK, keep=st.sampled_from([99, 99, 9, 6, 4]),
          new=st.lists(st.sampled_from([0, 1]), max_size=5))  # fmt: skip
    def plan(self, salt, like, keep, new):
        tokens = (*self.prompts[like % len(self.prompts)][:keep], *new)
        self.prompts = [*self.prompts[-6:], tokens]
        prompt = self.index.hash_prompt(tokens, ROOTS[salt])
        planned = self.usable(ROOTS[salt], tokens)
        if self.hash is sha256:
            assert cached(self.index, tokens, ROOTS[salt]) == planned
        plan = self.index.hold(prompt)
        self.index.start(plan)
        self.queried += len(tokens)
        assert plan.start < len(tokens) and plan.start % self.chunk == 0
        readers = sum(len(plan.entries) for plan, *_ in self.plans)
        if self.hash is sha256 and (
            self.capacity is None or readers + len(self.claims) < self.capacity
        ):
            assert plan.start == planned, "an entry was available"
        if plan.start:
            (snapshot,) = plan.entries
            assert self.device[snapshot.index] == (ROOTS[salt], tokens[: plan.start])
            self.check(snapshot.index)
        assert list(plan.save) == sorted(set(plan.save))
        assert all(boundary > plan.start for boundary in plan.save)
        saved = {prompt.hashes[boundary // self.chunk - 1] for boundary in plan.save}
        assert not saved & set(self.index._entries), "a snapshot is computed twice"
        self.plans.append((plan, tokens, ROOTS[salt]))

    def usable(self, salt, tokens):
        """The deepest boundary that has a snapshot and leaves a token to compute."""
        ready = {(s.data, s.hash) for s in self.index._entries.values() if s.ready}
        prompt = self.index.hash_prompt(tokens, salt)
        ends = range((len(tokens) - 1) // self.chunk, 0, -1)
        hashes = ((salt + encode(tokens[: n * self.chunk]), prompt.hashes[n - 1], n) for n in ends)
        return next((n * self.chunk for data, hash, n in hashes if (data, hash) in ready), 0)

    @precondition(lambda self: self.plans and len(self.claims) < 3)
    @rule(pick=PICK, which=PICK, anywhere=st.booleans())
    def claim(self, pick, which, anywhere):
        plan, tokens, salt = self.plans[pick % len(self.plans)]
        ends = range(self.chunk, len(tokens) + 1, self.chunk) if anywhere else plan.save
        if not ends:
            return
        boundary = ends[which % len(ends)]
        snapshot = self.index.claim(plan.prompt, boundary, plan)
        if snapshot is not None:
            self.claims.append((snapshot, plan.prompt, salt, tuple(tokens[:boundary])))

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def publish(self, pick):
        snapshot, prompt, salt, tokens = self.claims.pop(pick % len(self.claims))
        ids = page_ids(REWRITTEN, self.chunk, prompt, len(tokens))
        self.save(snapshot.index, (salt, tokens), ids)
        self.index.publish(snapshot)

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def withdraw(self, pick):
        """Give up a claim, as if its state could not be read."""
        snapshot, *_ = self.claims.pop(pick % len(self.claims))
        self.index.withdraw(snapshot)
        assert self.index.get(snapshot.hash) is None

    @precondition(lambda self: self.plans)
    @rule(pick=PICK)
    def release(self, pick):
        plan, *_ = self.plans.pop(pick % len(self.plans))
        self.index.release(plan)
        with pytest.raises(RuntimeError):
            self.index.release(plan)

    @rule(like=PICK, number=PICK, salt=st.sampled_from(ROOTS))
    def drop(self, like, number, salt):
        hashes = self.index.hash_prompt(self.prompts[like % len(self.prompts)], salt).hashes
        snapshot = self.index._entries.get(hashes[number % len(hashes)]) if hashes else None
        if snapshot is not None:
            idle = snapshot.ready and not snapshot.refs
            assert drop(self.index, snapshot.hash) == idle
            if idle and snapshot.level:
                del self.host[snapshot.index]  # the engine overwrites it

    @precondition(lambda self: self.index.tiers[0].taken > 2)
    @rule()
    def reset(self):
        busy = any(plan.entries for plan, *_ in self.plans) or self.claims
        assert self.index.reset() != bool(busy)
        if not busy:
            assert not any(tier.taken for tier in self.index.tiers)
            self.pages.clear()
            self.device.clear()
            self.host.clear()

    @invariant()
    def add_up(self):
        type(self).steps += 1
        index, counts = self.index, self.index.counts
        assert counts.tokens == self.queried == counts.tokens_hit + sum(counts.missed.values())
        entries = list(index._entries.values())
        by_tier = Counter(snapshot.level for snapshot in entries)
        device, host = index.tiers
        assert (by_tier[0], by_tier[1]) == (device.taken, host.taken)
        assert self.capacity is None or device.taken <= self.capacity
        assert host.taken <= self.host_capacity
        places = {(snapshot.level, snapshot.index) for snapshot in entries}
        assert len(places) == len(entries), "two snapshots in one place"
        users = Counter(snapshot for plan, *_ in self.plans for snapshot in plan.entries)
        users.update(snapshot for snapshot, *_ in self.claims)
        assert all(snapshot.refs == users[snapshot] for snapshot in entries)
        assert set(users) <= set(entries), "a snapshot is gone while it is used"
        assert index.in_use == len(users)

    @invariant()
    def snapshots_have_their_content(self):
        for snapshot in self.index._entries.values():
            if not snapshot.ready:
                continue
            level, place = snapshot.level, snapshot.index
            salt, tokens = self.host[place][0] if level else self.device[place]
            assert snapshot.data == salt + encode(tokens) and len(tokens) == snapshot.boundary
            assert self.index.hash_prompt(tokens, salt).hashes[-1] == snapshot.hash
            if not level:
                self.check(place)


class Colliding(Machine):
    """There are only 16 hashes, so collisions are common."""

    hash = staticmethod(lambda data: bytes([sha256(data)[0] % 16]))


@pytest.mark.parametrize("kind, examples", [(Machine, 80), (Colliding, 40)])
def test_snapshots_keep_their_invariants(kind, examples):
    run(kind, examples)
    assert kind.steps >= 20 * examples
