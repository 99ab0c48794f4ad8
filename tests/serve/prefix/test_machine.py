"""Random operations on an index of blocks: behaviours 15, 28 and 34 of the reference.

Here each place contains the whole prefix up to the end of its block. On one tier, the index must
agree with a naive one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxkv.serve.prefix import Lease, PrefixIndex, encode, root_hash
from jaxkv.serve.prefix.block_hash import TOKEN, sha256
from tests.serve.prefix.naive import Naive
from tests.serve.prefix.prompts import drop, unused

ROOTS = [root_hash(salt=None), root_hash(salt="a")]
TOKENS = st.sampled_from([0, 1])
PICK = st.sampled_from(range(24))
SALT = st.sampled_from([ROOTS[0], ROOTS[0], ROOTS[0], ROOTS[1]])
KEEP = st.sampled_from([99, 99, 99, 99, 9, 6, 4, 3])
MORE = st.sampled_from([0, 0, 0, 1, 2, 5])


@dataclass
class Request:
    lease: Lease
    tokens: list[int]
    naive: list[tuple] | None

    @property
    def root(self):
        return self.lease.prompt.root


class Machine(RuleBasedStateMachine):
    """hash: the hash function. forced: blocks are removed by force, which leaves gaps in chains."""

    hash = staticmethod(sha256)
    forced = False
    steps = 0

    @initialize(data=st.data())
    def begin(self, data):
        draw = data.draw
        self.block = draw(st.sampled_from([1, 2, 3, 4]))
        capacity = draw(st.sampled_from([None, 1, 3, 5, 8, 12]))
        host = draw(st.sampled_from([0, 0, 1, 3, 99])) if capacity else 0
        self.index = PrefixIndex(
            self.block, (capacity, host), linked=True, hash=self.hash, move=self.move
        )
        exact = self.hash is sha256 and not self.forced and not host
        self.naive = Naive(self.block, capacity) if exact else None
        self.requests: list[Request] = []
        self.content: dict[tuple[int, int], tuple] = {}  # by tier and place
        # Later prompts begin like earlier ones.
        self.prompts = [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 0], [7] * 9]
        self.queried = 0

    def move(self, level, place, new_level, new_place):
        self.content[new_level, new_place] = self.content.pop((level, place))

    @precondition(lambda self: len(self.requests) < 5)
    @rule(salt=SALT, like=PICK, keep=KEEP, grow=MORE, now=st.booleans(), data=st.data())
    def admit(self, salt, like, keep, grow, now, data):
        """Admit a request. now: compute its prompt at once."""
        tokens = [*self.prompts[like % len(self.prompts)][:keep]]
        tokens += data.draw(st.lists(TOKENS, min_size=grow, max_size=grow))
        self.prompts = [*self.prompts[-6:], tokens]
        prompt = self.index.hash_prompt(tokens, salt)
        matches = list(self.index.matches(prompt))
        lease = self.index.hold(prompt)
        self.index.start(lease)
        self.queried += len(tokens)
        assert lease.entries == matches[: len(lease.entries)]
        assert lease.start == len(lease.entries) * self.block < len(tokens)
        held = self.naive.hold(salt, tokens) if self.naive else None
        if self.naive:
            assert len(lease.entries) == len(matches) == len(held)
        for block in lease.entries:
            assert self.content[0, block.index] == (salt, *tokens[: block.boundary])
        self.requests.append(Request(lease, tokens, held))
        if now:
            self.compute(len(self.requests) - 1, 99)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, count=st.sampled_from([1, 2, 3, 99]))
    def compute(self, pick, count):
        """Prefill and store the next blocks of a request."""
        request = self.requests[pick % len(self.requests)]
        lease, index = request.lease, self.index
        for boundary in [at for at in lease.save if at > len(lease.entries) * self.block][:count]:
            before = len(lease.entries)
            block = index.claim(lease.prompt, boundary, lease)
            if block is not None:
                assert not block.level and block not in self.readers()
                assert index.claim(lease.prompt, boundary, lease) is None, "it is being written"
                self.content[0, block.index] = (request.root, *request.tokens[:boundary])
                index.publish(block, lease)
            held = len(lease.entries) > before
            if self.naive:
                assert self.naive.save(request.naive, request.root, request.tokens) == held
            if not held:
                return
            tokens = (request.root, *request.tokens[:boundary])
            assert self.content[0, lease.entries[-1].index] == tokens

    @rule(salt=SALT, like=PICK, keep=KEEP, grow=MORE, data=st.data())
    def serve(self, salt, like, keep, grow, data):
        """Serve a whole request."""
        before = len(self.requests)
        self.admit(salt, like, keep, grow, True, data)
        self.release(before)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def release(self, pick):
        request = self.requests.pop(pick % len(self.requests))
        self.index.release(request.lease)
        with pytest.raises(RuntimeError):
            self.index.release(request.lease)
        if self.naive:
            self.naive.release(request.naive)

    @precondition(lambda self: self.forced)
    @rule(salt=SALT, like=PICK, number=PICK)
    def drop(self, salt, like, number):
        hashes = self.index.hash_prompt(self.prompts[like % len(self.prompts)], salt).hashes
        if hashes:
            drop(self.index, hashes[number % len(hashes)])

    @precondition(lambda self: len(self.index) > 4)
    @rule()
    def reset(self):
        assert self.index.reset() != bool(self.readers())
        if not len(self.index):
            self.content.clear()
            if self.naive:
                self.naive.entries.clear()

    def readers(self):
        return Counter(block for request in self.requests for block in request.lease.entries)

    @invariant()
    def add_up(self):
        type(self).steps += 1
        index, readers, entries = self.index, self.readers(), self.index._entries
        assert all(block.refs == readers[block] for block in entries.values())
        assert set(readers) <= set(entries.values()), "a block is gone while it is read"
        assert index.in_use == len(readers) and not any(block.level for block in readers)
        for level, tier in enumerate(index.tiers):
            blocks = [block for block in entries.values() if block.level == level]
            assert sorted(map(id, tier.lru)) == sorted(map(id, blocks))
            assert tier.taken == len({block.index for block in blocks}) == len(blocks)
            assert tier.capacity is None or tier.taken <= tier.capacity
        counts = index.counts
        assert counts.tokens == self.queried == counts.tokens_hit + sum(counts.missed.values())

    @invariant()
    def cached_tokens_have_their_content(self):
        prefixes = {root: (root,) for root in ROOTS}
        entries = self.index._entries
        assert all(hash == block.hash for hash, block in entries.items())
        for block in sorted(entries.values(), key=lambda block: block.boundary):
            parent = block.parent
            if parent is not None and entries.get(parent.hash) is not parent:
                assert self.forced, "an orphan"
                continue
            tokens = block.data[-self.block * TOKEN :]
            root = block.data[: -len(tokens)] if parent is None else None
            before = prefixes.get(root if parent is None else parent)
            if before is None:
                continue  # an orphan's child
            prefix = prefixes[block] = before + tuple(
                int.from_bytes(tokens[at : at + TOKEN], "little")
                for at in range(0, len(tokens), TOKEN)
            )
            assert block.boundary == len(prefix) - 1
            assert self.content[block.level, block.index] == prefix

    @invariant()
    def a_naive_index_agrees(self):
        if self.naive is None:
            return
        index, naive = self.index, self.naive
        assert (len(index), index.counts.evictions) == (len(naive.entries), naive.evictions)
        boundaries = {block.index: block.boundary for block in index._entries.values()}
        assert [boundaries[place] + 1 for place in unused(index)] == list(map(len, naive.unused()))

    @rule(salt=SALT, like=PICK, end=st.sampled_from([99, 7, 5, 4]))
    def match(self, salt, like, end):
        """A lookup must find the longest chain of blocks with the prompt's tokens."""
        tokens = self.prompts[like % len(self.prompts)][:end]
        matches = list(self.index.matches(self.index.hash_prompt(tokens, salt)))
        if self.naive:
            assert len(matches) == len(self.naive.cached(salt, tokens))
        if self.hash is not sha256 or self.forced:
            return
        published = set()
        for block in self.index._entries.values():
            data = b""
            while block.parent is not None:
                data, block = block.data[-self.block * TOKEN :] + data, block.parent
            published.add(block.data + data)
        matched = 0
        for size in range(self.block, len(tokens), self.block):
            if salt + encode(tokens[:size]) not in published:
                break
            matched = size
        assert len(matches) * self.block == matched


class Colliding(Machine):
    """There are only 16 hashes, so collisions are common."""

    hash = staticmethod(lambda data: bytes([sha256(data)[0] % 16]))


class Forced(Machine):
    forced = True


@pytest.mark.parametrize("kind, examples", [(Machine, 50), (Colliding, 40), (Forced, 30)])
def test_an_index_of_blocks_keeps_its_invariants(kind, examples):
    """Every invariant is checked after every step."""
    run(kind, examples)
    assert kind.steps >= 20 * examples


def run(kind, examples):
    kind.steps = 0
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=examples, stateful_step_count=50, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
