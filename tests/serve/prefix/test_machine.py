"""Random operations on a pool in random order: behaviours 15, 28 and 34 of the reference.

Here each slot of a page contains the whole prefix up to its token. The slots of tokens that the
pool reports as cached must have their prefix. In full mode the pool must agree with a naive pool.
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

from jaxkv.serve.prefix import BlockPool, Lease, encode, root_hash
from jaxkv.serve.prefix.block_hash import TOKEN, sha256
from tests.serve.prefix.naive import Naive, Table
from tests.serve.prefix.prompts import drop_block

ROOTS = [root_hash(salt=None), root_hash(salt="a")]
TOKENS = st.sampled_from([0, 1])
PICK = st.sampled_from(range(24))
SALT = st.sampled_from([ROOTS[0], ROOTS[0], ROOTS[0], ROOTS[1]])
KEEP = st.sampled_from([99, 99, 99, 99, 9, 6, 4, 3])
MORE = st.sampled_from([0, 0, 0, 1, 2, 5])


@dataclass
class Request:
    lease: Lease
    root: bytes
    tokens: list[int]
    computed: int  # tokens
    naive: Table | None


class Machine(RuleBasedStateMachine):
    """hash: the hash function. forced: blocks are removed by force, which leaves gaps in chains."""

    modes = ("full", "alias", "rekey")
    hash = staticmethod(sha256)
    forced = False
    steps = 0

    @initialize(data=st.data())
    def begin(self, data):
        draw = data.draw
        self.block = draw(st.sampled_from([1, 2, 3, 4]))
        about = {
            "num_blocks": draw(st.sampled_from([None, 8, 12, 16, 20])),
            "capacity": draw(st.sampled_from([None, None, 0, 2, 5])),
            "cap": draw(st.booleans()),
        }
        mode, order = (
            draw(st.sampled_from(c)) for c in (self.modes, ("lru", "lru-deepest-first", "lfu"))
        )
        host = draw(st.sampled_from([0, 0, 1, 3, 99])) if mode == "full" else 0
        self.pool = BlockPool(
            self.block, mode=mode, order=order, hash=self.hash, host_blocks=host, **about
        )
        exact = mode == "full" and self.hash is sha256 and not self.forced and not host
        self.naive = Naive(self.block, lfu=order == "lfu", **about) if exact else None
        self.requests: list[Request] = []
        self.pages: dict[int | tuple, dict[int, tuple]] = {}  # by page, or ("host", page)
        # Later prompts begin like earlier ones.
        self.prompts = [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 0], [7] * 9]
        self.queried = 0

    @precondition(lambda self: len(self.requests) < 5)
    @rule(salt=SALT, like=PICK, keep=KEEP, grow=MORE, room=MORE, now=st.booleans(), data=st.data())
    def admit(self, salt, like, keep, grow, room, now, data):
        """Admit a request. now: compute its prompt at once."""
        tokens = [*self.prompts[like % len(self.prompts)][:keep]]
        tokens += data.draw(st.lists(TOKENS, min_size=grow, max_size=grow))
        self.prompts = [*self.prompts[-6:], tokens]
        prompt = self.pool.hash_prompt(tokens, salt)
        matched_blocks = self.pool.match(prompt)
        assert matched_blocks.usable + sum(matched_blocks.missed.values()) == len(tokens)
        assert matched_blocks.usable <= matched_blocks.matched <= len(tokens)
        lease = self.pool.admit(prompt, extra_tokens=room)
        table = self.naive.admit(salt, tokens, room) if self.naive else None
        if self.naive:
            assert (lease is None) == (table is None)
        if lease is None:
            return
        self.queried += len(tokens)
        if self.naive:
            assert (
                lease.cached
                == matched_blocks.usable
                == sum(self.block for prefix in table.prefixes if prefix)
            )
        if self.pool.cap:
            assert lease.cached < len(tokens)
        request = Request(lease, salt, tokens, lease.cached, table)
        self.follow_transfers()
        self.copy(lease)
        for position in range(lease.cached):
            page, row = lease.pages[position // self.block], position % self.block
            assert self.pages[page][row] == (salt, *tokens[: position + 1])
        self.requests.append(request)
        if now:
            self.read(request, len(tokens))

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, count=st.sampled_from([1, 2, 3, 99]))
    def compute(self, pick, count):
        self.read(self.requests[pick % len(self.requests)], count)

    def read(self, request, count):
        for position in range(request.computed, min(request.computed + count, len(request.tokens))):
            self.write(request, position)
        self.publish(request)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, tokens=st.lists(TOKENS, min_size=1, max_size=6))
    def generate(self, pick, tokens):
        request = self.requests[pick % len(self.requests)]
        for token in tokens if request.computed == len(request.tokens) else ():
            done = self.pool.append(request.lease, token)
            if self.naive:
                assert self.naive.append(request.naive, token) == done
            if not done:
                return
            self.follow_transfers()
            self.copy(request.lease)
            request.tokens = [*request.tokens, token]
            self.write(request, len(request.tokens) - 1)
            self.publish(request)
        self.prompts = [*self.prompts[-6:], request.tokens]

    @rule(salt=SALT, like=PICK, keep=KEEP, grow=MORE,
          new=st.lists(TOKENS, max_size=6), data=st.data())  # fmt: skip
    def serve(self, salt, like, keep, grow, new, data):
        """Serve a whole request."""
        before = len(self.requests)
        self.admit(salt, like, keep, grow, 0, True, data)
        if len(self.requests) > before:
            self.generate(before, new)
            self.release(before)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def release(self, pick):
        request = self.requests.pop(pick % len(self.requests))
        self.pool.release(request.lease)
        self.follow_transfers()
        with pytest.raises(RuntimeError):
            self.pool.release(request.lease)
        if self.naive:
            self.naive.release(request.naive)

    @precondition(lambda self: self.forced)
    @rule(salt=SALT, like=PICK, number=PICK)
    def drop(self, salt, like, number):
        hashes = self.pool.hash_prompt(self.prompts[like % len(self.prompts)], salt).hashes
        if hashes:
            drop_block(self.pool, hashes[number % len(hashes)])

    @precondition(lambda self: not self.requests and self.pool.cached > 4)
    @rule()
    def reset(self):
        assert self.pool.reset()
        if self.naive:
            self.naive.entries.clear()

    def follow_transfers(self):
        for source, page, target, slot in self.pool.transfers:
            old = ("host", page) if source == "host" else page
            new = ("host", slot) if target == "host" else slot
            self.pages[new] = self.pages.pop(old)  # the old page must not be read again
        self.pool.transfers.clear()

    def copy(self, lease):
        for source, target, rows in lease.copies:
            assert source != target
            content = self.pages.setdefault(source, {})
            self.pages[target] = {row: content.get(row) for row in range(rows)}
        lease.copies.clear()

    def write(self, request, position):
        block, row = request.lease.blocks[position // self.block], position % self.block
        sharers = [sharer for sharer in self.requests if block in sharer.lease.blocks]
        assert sharers == [request], "written while another request uses it"
        assert not block.hashes or row >= len(block.tokens) // TOKEN, "written where it is cached"
        prefix = (request.root, *request.tokens[: position + 1])
        self.pages.setdefault(block.page, {})[row] = prefix
        request.computed = max(request.computed, position + 1)

    def publish(self, request):
        self.pool.publish(request.lease, request.computed)
        if self.naive:
            self.naive.publish(request.root, request.naive, request.computed)

    @invariant()
    def add_up(self):
        type(self).steps += 1
        pool = self.pool
        in_use = Counter(block for request in self.requests for block in request.lease.blocks)
        assert all(block.refs == count for block, count in in_use.items())
        assert not any(block.on_host for block in in_use)
        cached = list(pool._pages.cached)
        assert all(not block.refs and block.hashes for block in cached)
        pages = [*pool._pages.free, *(b.page for b in cached), *(b.page for b in in_use)]
        assert sorted(pages) == list(range(pool.num_blocks))
        assert pool.free + pool.active + pool.cached == pool.num_blocks
        assert pool.active == len(in_use) and pool.cached == len(cached)
        assert pool.capacity is None or pool.cached <= pool.capacity
        on_host = [block for block in set(pool._index._entries.values()) if block.on_host]
        assert pool.host_taken == len({block.page for block in on_host}) == len(on_host)
        assert not any(block.refs for block in on_host)
        counts = pool.counts.lookups
        assert counts.tokens == self.queried == counts.tokens_hit + sum(counts.missed.values())
        assert counts.blocks_hit <= counts.blocks and counts.full_blocks_hit <= counts.full_blocks

    @invariant()
    def cached_tokens_have_their_content(self):
        pool, prefixes = self.pool, {root: (root,) for root in ROOTS}
        entries = pool._index._entries
        assert all(hash in block.hashes for hash, block in entries.items())
        for block in sorted(set(entries.values()), key=lambda block: block.depth):
            parent = block.parent
            if not isinstance(parent, bytes) and not parent.hashes:
                assert self.forced, "an orphan"
                continue
            if parent not in prefixes:
                continue  # an orphan's child
            prefix = prefixes[block] = prefixes[parent] + tuple(
                int.from_bytes(block.tokens[at : at + TOKEN], "little")
                for at in range(0, len(block.tokens), TOKEN)
            )
            assert block.depth == (len(prefixes[parent]) - 1) // self.block
            for row in range(len(block.tokens) // TOKEN):
                begin = len(prefix) - len(block.tokens) // TOKEN
                page = ("host", block.page) if block.on_host else block.page
                assert self.pages[page][row] == prefix[: begin + row + 1]

    @invariant()
    def a_naive_pool_agrees(self):
        if self.naive is None:
            return
        pool, naive = self.pool, self.naive
        assert (pool.entries, pool.counts.evictions) == (len(naive.entries), naive.evictions)
        assert [(block.depth + 1) * self.block + 1 for block in pool._pages.cached] == list(
            map(len, naive.cached())
        )

    @rule(salt=SALT, like=PICK, end=st.sampled_from([99, 7, 5, 4]))
    def match(self, salt, like, end):
        """A lookup must find the longest chain of entries with the prompt's tokens."""
        tokens = self.prompts[like % len(self.prompts)][:end]
        matched_blocks = self.pool.match(self.pool.hash_prompt(tokens, salt))
        if self.naive:
            assert matched_blocks.usable == self.naive.usable(salt, tokens)
        if self.hash is not sha256 or self.forced:
            return
        published, matched = set(), 0
        for block in set(self.pool._index._entries.values()):
            chain = [block]
            while not isinstance(chain[-1].parent, bytes):
                chain.append(chain[-1].parent)
            data = b"".join(link.tokens for link in reversed(chain))
            published.add(chain[-1].parent + data)
            if self.pool.mode == "alias" and len(block.hashes) > 1:  # the tail of its prompt too
                sizes = [len(p) for p in self.tails(block, data, chain[-1].parent)]
                published.update(chain[-1].parent + data[:size] for size in sizes)
        block_ends = [n for n in range(self.block, len(tokens) + 1, self.block)]
        for size in block_ends + ([len(tokens)] if self.pool.mode != "full" else []):
            if salt + encode(tokens[:size]) not in published:
                break
            matched = size
        assert matched_blocks.matched == matched

    def tails(self, block, data, salt):
        """Shorter prompts whose hashes also name a full block."""
        begin = len(data) - len(block.tokens)
        for size in range(begin + TOKEN, len(data), TOKEN):
            count = size // TOKEN
            tokens = [int.from_bytes(data[4 * n : 4 * n + 4], "little") for n in range(count)]
            if self.pool.hash_prompt(tokens, salt).hashes[-1] in block.hashes:
                yield data[:size]


class Colliding(Machine):
    """There are only 16 hashes, so collisions are common."""

    hash = staticmethod(lambda data: bytes([sha256(data)[0] % 16]))


class Forced(Machine):
    forced = True


@pytest.mark.parametrize("kind, examples", [(Machine, 50), (Colliding, 40), (Forced, 30)])
def test_a_pool_keeps_its_invariants(kind, examples):
    """Every invariant is checked after every step."""
    run(kind, examples)
    assert kind.steps >= 20 * examples


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Machine, Colliding, Forced])
def test_a_pool_keeps_its_invariants_in_a_long_run(kind):
    run(kind, 150)
    assert kind.steps >= 3_000


def run(kind, examples):
    kind.steps = 0
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=examples, stateful_step_count=50, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
