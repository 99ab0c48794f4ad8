"""Owners have equal shares of a full memory, borrow what is free, and lose it when idle."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxkv.serve.prefix import PrefixIndex, owners
from jaxkv.serve.prefix.owners import IDLE, Shares
from tests.serve.prefix.prompts import ROOT, cached, serve

SIZE = 4  # tokens of a chunk
KINDS = pytest.mark.parametrize("linked", [True, False], ids=["blocks", "snapshots"])


def make(linked: bool, capacity: int, host: int = 0) -> PrefixIndex:
    return PrefixIndex(SIZE, (capacity, host), linked=linked, where="last")


def prompt(number: int) -> list[int]:
    """A prompt of one block and one token, which shares nothing."""
    return [number, 1, 2, 3, 4]


def stored(index, numbers) -> list[int]:
    return [number for number in numbers if cached(index, prompt(number))]


@KINDS
@pytest.mark.parametrize("host", [0, 6])
def test_one_owner_cannot_evict_the_share_of_another(linked, host):
    index = make(linked, 8, host)
    for number in range(20):
        serve(index, prompt(number), owner="a")
    assert len(stored(index, range(20))) == 8 + host, "alone, an owner borrows everything"
    for number in range(100, 104 + host // 2):
        serve(index, prompt(number), owner="b")
    assert stored(index, range(100, 104 + host // 2)) == [*range(100, 104 + host // 2)]
    for number in range(20, 90):
        serve(index, prompt(number), owner="a")
    assert stored(index, range(100, 104 + host // 2)) == [*range(100, 104 + host // 2)]
    assert len(stored(index, range(90))) == 4 + host // 2


def test_a_long_prompt_takes_no_page_within_the_share_of_another():
    index = make(True, 8)
    serve(index, [*range(16), 0], owner="a")  # 4 blocks
    for start in range(100, 1000, 100):
        serve(index, [*range(start, start + 7 * SIZE), 0], owner="b")
    assert cached(index, [*range(16), 0]) == 16
    assert cached(index, [*range(900, 900 + 7 * SIZE), 0]) == 16, "b has the other half"


@KINDS
def test_an_idle_owner_loses_its_share(linked, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(owners, "monotonic", lambda: now[0])
    index = make(linked, 8)
    for number in range(4):
        serve(index, prompt(number), owner="idle")
    now[0] = IDLE - 1
    for number in range(100, 120):
        serve(index, prompt(number), owner="busy")
    assert stored(index, range(4)) == [0, 1, 2, 3]
    now[0] = IDLE + 1
    for number in range(120, 140):
        serve(index, prompt(number), owner="busy")
    assert stored(index, range(4)) == [] and len(stored(index, range(100, 140))) == 8


@KINDS
def test_three_owners_at_random(linked):
    """Nobody with less than an equal share loses an entry to another."""
    rng, index = np.random.default_rng(0), make(linked, 9)
    mine = {name: [n * 1000 + i for i in range(30)] for n, name in enumerate("abc")}
    weights = {"a": 0.8, "b": 0.15, "c": 0.05}
    held: Counter[str] = Counter()
    fewest = 9
    for step in range(800):
        name = str(rng.choice(list(weights), p=list(weights.values())))
        serve(index, prompt(int(rng.choice(mine[name]))), owner=name)
        before, held = held, Counter({n: len(stored(index, mine[n])) for n in mine})
        assert sum(held.values()) <= 9
        for owner in mine:
            assert owner == name or held[owner] >= min(before[owner], 3)
        if step > 300:
            fewest = min(fewest, *held.values())
    assert fewest >= 3


def test_owners_with_one_root_never_lose_a_parent_before_its_child():
    """Keys of equal salt share prefixes: a tree of blocks belongs to whoever began it."""
    rng, index = np.random.default_rng(1), make(True, 12)
    for _ in range(1500):
        tokens = [int(rng.integers(3))] + [int(t) for t in rng.integers(2, size=15)]
        serve(index, [*tokens, 0], owner=str(rng.choice(["a", "b"])))
        blocks = index.matches(index.hash_prompt(tokens, ROOT))
        assert len({block.owner for block in blocks}) <= 1
        for block in index._entries.values():
            parent = block.parent
            assert parent is None or index.get(parent.hash) is parent
    assert index.counts.tokens_hit > 500


def test_owners_that_left_are_forgotten():
    shares = Shares()
    for number in range(1000):
        shares.touch(str(number))
        shares.order({str(number): 1, "other": 1}, None)
    assert len(shares._used) < 100
