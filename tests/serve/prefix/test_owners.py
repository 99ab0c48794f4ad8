"""Owners have equal shares of a full memory, borrow what is free, and lose it when idle."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxkv.serve.prefix import BlockPool, Snapshots, owners
from jaxkv.serve.prefix.eviction import ORDERS
from jaxkv.serve.prefix.owners import IDLE, Shares

SIZE = 4  # tokens of a block or a chunk


class Blocks:
    """A pool of blocks, in which each prompt stores its full blocks."""

    def __init__(self, capacity: int, host: int = 0, order: str = "lru") -> None:
        self.pool = BlockPool(SIZE, capacity, mode="full", order=order, host_blocks=host)

    def store(self, tokens: list[int], owner: str | None, root: bytes = b"") -> int:
        """Prefill a prompt; returns its cached tokens."""
        hashed, tail = self.pool.hash_prompt(tokens, root, owner), len(tokens) % SIZE
        lease = self.pool.admit(hashed, extra_tokens=-tail, partly=True)
        self.pool.publish(lease)
        self.pool.release(lease)
        self.pool.transfers.clear()
        return lease.cached

    def cached(self, tokens: list[int], root: bytes = b"") -> int:
        return self.pool.match(self.pool.hash_prompt(tokens, root)).usable


class States:
    """Snapshots at the last boundary of each prompt."""

    def __init__(self, capacity: int, host: int = 0, order: str = "lru") -> None:
        self.pool = Snapshots(capacity, SIZE, "last", host)

    def store(self, tokens: list[int], owner: str | None, root: bytes = b"") -> int:
        """Prefill a prompt; returns its cached tokens."""
        plan = self.pool.plan_prefill(self.pool.hash_prompt(tokens, root, owner))
        for boundary in plan.save:
            if (snapshot := self.pool.claim(plan.prompt, boundary)) is not None:
                self.pool.publish(snapshot)
        self.pool.release(plan)
        self.pool.transfers.clear()
        return plan.start

    def cached(self, tokens: list[int], root: bytes = b"") -> int:
        claim = self.pool.find(self.pool.hash_prompt(tokens, root))
        return 0 if claim is None else claim.boundary


KINDS = pytest.mark.parametrize("kind", [Blocks, States])


def prompt(number: int) -> list[int]:
    """A prompt of one block and one token, which shares nothing."""
    return [number, 1, 2, 3, 4]


def stored(index, numbers) -> list[int]:
    return [number for number in numbers if index.cached(prompt(number))]


@KINDS
@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("host", [0, 6])
def test_one_owner_cannot_evict_the_share_of_another(kind, order, host):
    index = kind(8, host, order)
    for number in range(20):
        index.store(prompt(number), "a")
    assert len(stored(index, range(20))) == 8 + host, "alone, an owner borrows everything"
    for number in range(100, 104 + host // 2):
        index.store(prompt(number), "b")
    assert stored(index, range(100, 104 + host // 2)) == [*range(100, 104 + host // 2)]
    for number in range(20, 90):
        index.store(prompt(number), "a")
    assert stored(index, range(100, 104 + host // 2)) == [*range(100, 104 + host // 2)]
    assert len(stored(index, range(90))) == 4 + host // 2


def test_a_long_prompt_takes_no_page_within_the_share_of_another():
    index = Blocks(8)
    index.store([*range(16), 0], "a")  # 4 blocks
    for start in range(100, 1000, 100):
        index.store([*range(start, start + 7 * SIZE), 0], "b")
    assert index.cached([*range(16), 0]) == 16
    assert index.cached([*range(900, 900 + 7 * SIZE), 0]) == 16, "b has the other half"


@KINDS
def test_without_owners_the_least_recently_used_is_evicted(kind):
    """What the test above would show without shares."""
    index = kind(8)
    for number in range(100, 104):
        index.store(prompt(number), None)
    for number in range(8):
        index.store(prompt(number), None)
    assert stored(index, range(100, 104)) == [] and len(stored(index, range(8))) == 8


@KINDS
def test_an_idle_owner_loses_its_share(kind, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(owners, "monotonic", lambda: now[0])
    index = kind(8)
    for number in range(4):
        index.store(prompt(number), "idle")
    now[0] = IDLE - 1
    for number in range(100, 120):
        index.store(prompt(number), "busy")
    assert stored(index, range(4)) == [0, 1, 2, 3]
    now[0] = IDLE + 1
    for number in range(120, 140):
        index.store(prompt(number), "busy")
    assert stored(index, range(4)) == [] and len(stored(index, range(100, 140))) == 8


@KINDS
def test_three_owners_at_random(kind):
    """Nobody with less than an equal share loses an entry to another."""
    rng, index = np.random.default_rng(0), kind(9)
    mine = {name: [n * 1000 + i for i in range(30)] for n, name in enumerate("abc")}
    weights = {"a": 0.8, "b": 0.15, "c": 0.05}
    held: Counter[str] = Counter()
    fewest = 9
    for step in range(800):
        name = str(rng.choice(list(weights), p=list(weights.values())))
        index.store(prompt(int(rng.choice(mine[name]))), name)
        before, held = held, Counter({n: len(stored(index, mine[n])) for n in mine})
        assert sum(held.values()) <= 9
        for owner in mine:
            assert owner == name or held[owner] >= min(before[owner], 3)
        if step > 300:
            fewest = min(fewest, *held.values())
    assert fewest >= 3


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_owners_with_one_root_never_lose_a_parent_before_its_child(order):
    """Keys of equal salt share prefixes: a tree of blocks belongs to whoever began it."""
    rng, index = np.random.default_rng(1), Blocks(12, order=order)
    hits = 0
    for _ in range(1500):
        tokens = [int(rng.integers(3))] + [int(t) for t in rng.integers(2, size=15)]
        hits += index.store([*tokens, 0], str(rng.choice(["a", "b"])))
        blocks, collided = index.pool._index.walk(index.pool.hash_prompt(tokens, b""))
        assert not collided
        assert len({block.owner for block in blocks}) <= 1
    for block in index.pool._index._entries.values():
        while not isinstance(block, bytes):
            assert block.hashes, "a parent was evicted before its child"
            block = block.parent
    assert hits > 500


def test_the_order_of_owners():
    shares = Shares()
    for name in ("a", "b", "c"):
        shares.touch(name)
    sizes = {"a": 2, "b": 3, "c": 3, "unknown": 1}
    assert shares.order(sizes, "b") == ["unknown", "b", "c", "a"]
    assert shares.order(sizes, "c") == ["unknown", "c", "b", "a"]


def test_owners_that_left_are_forgotten():
    shares = Shares()
    for number in range(1000):
        shares.touch(str(number))
        shares.order({str(number): 1, "other": 1}, None)
    assert len(shares._used) < 100
