"""A pool of blocks: behaviours 1 to 11, 14, 16, 21, 23, 25 and 35 of the reference."""

from __future__ import annotations

from itertools import repeat

import pytest

from jaxkv.errors import UserError
from jaxkv.serve.prefix import BlockPool, root_hash
from jaxkv.serve.prefix.lease import Copy
from tests.serve.prefix.prompts import ROOT, P, admit, cached, drop_block, match, refs, serve

MODES = ("rekey", "alias", "full")


@pytest.mark.parametrize("mode, entries", [("rekey", 4), ("alias", 4), ("full", 3)])
def test_01_every_block_of_a_prompt_is_cached(mode, entries):
    pool = BlockPool(4, mode=mode)
    lease = admit(pool, P)
    assert (pool.entries, lease.cached, pool.active) == (entries, 0, 4)
    assert pool.counts.lookups.tokens_hit == 0


def test_02_the_same_prompt_shares_full_blocks():
    pool = BlockPool(4, mode="full")
    first, second = admit(pool, P), admit(pool, P)
    assert second.cached == 12
    assert first.pages[:3] == second.pages[:3] and first.pages[3] != second.pages[3]
    assert refs(second) == [2, 2, 2, 1]


def test_03_the_last_token_is_always_computed():
    pool = BlockPool(4, mode="full")
    serve(pool, P[:12])
    assert match(pool, P[:12]).usable == 8 and serve(pool, P[:12]) == 8
    for mode in MODES:
        pool = BlockPool(4, mode=mode)
        serve(pool, P[:1])
        assert serve(pool, P[:1]) == 0
    assert serve(BlockPool(1), P[:1]) == 0


def test_04_a_shared_tail_is_copied():
    pool = BlockPool(4, mode="alias")
    first = admit(pool, P)
    pool.append(first, 1)
    matched = match(pool, P)
    assert (matched.matched, matched.usable, matched.pages) == (14, 13, first.pages)
    second = admit(pool, P)
    assert second.cached == 13
    assert second.copies == [Copy(first.pages[3], second.pages[3], 1)]
    assert first.pages[3] != second.pages[3] and refs(first) == [2, 2, 2, 1]


def test_04_a_full_last_block_is_copied_too():
    pool = BlockPool(4, mode="alias")
    serve(pool, P[:12])
    second = admit(pool, P[:12], computed=11)
    assert second.cached == 11
    assert [copy.tokens for copy in second.copies] == [3]
    pool.publish(second)  # equal to the copied block, so only one of them stays
    assert second.copies[0].source == second.pages[2]
    assert pool.counts.duplicates == 1


def test_05_growth_changes_the_hash():
    pool = BlockPool(4, mode="rekey")
    lease = admit(pool, P)
    grown = [*P, 1, 2, 3]
    for size in (15, 16, 17):
        pool.append(lease, grown[size - 1])
        pool.publish(lease)
        assert pool.entries == -(-size // 4)
        assert match(pool, P).matched == 12  # the hash of 14 tokens is gone
        assert match(pool, grown[:size]).matched == size
    assert len(lease.blocks) == 5


def test_05_an_alias_keeps_the_hash_of_the_prompt():
    pool = BlockPool(4, mode="alias")
    lease = admit(pool, P)
    for size in (15, 16, 17):
        pool.append(lease, size)
        pool.publish(lease)
        assert match(pool, P).matched == 14
    assert match(pool, [*P, 15, 16, 17]).matched == 16  # what the next chat turn sends
    assert pool.entries == 5
    pool.release(lease)
    assert match(pool, P).matched == 14 and (pool.cached, pool.free) == (4, 1)


def test_06_a_shared_tail_is_copied_before_a_write():
    pool = BlockPool(4, mode="rekey", cap=False)
    first, second = admit(pool, P), admit(pool, P)
    assert first.pages == second.pages and refs(first) == [2, 2, 2, 2]
    before = list(second.pages)
    pool.append(second, 1)
    pool.publish(second)
    assert second.copies == [Copy(before[3], second.pages[3], 2)]
    assert second.pages[3] not in before and refs(first) == [2, 2, 2, 1]
    assert match(pool, P).pages == first.pages
    assert match(pool, [*P, 1]).pages == second.pages
    pool.append(first, 2)  # no other request uses the tail now
    assert not first.copies and first.pages == before


@pytest.mark.parametrize("order", ["lru", "lru-deepest-first", "lfu"])
def test_07_blocks_become_evictable_when_the_last_request_releases_them(order):
    pool = BlockPool(4, mode="full", order=order)
    first, second = admit(pool, P[:12]), admit(pool, [*P[:12], 1])
    pool.release(first)
    assert refs(second)[:3] == [1, 1, 1] and pool.cached == 0
    pool.release(second)
    assert (pool.cached, pool.active) == (3, 0)


def test_08_tails_are_evicted_before_heads():
    pool = BlockPool(4, mode="alias")
    lease = admit(pool, P)
    pool.release(lease)
    assert cached(pool) == lease.pages[::-1]
    pool = BlockPool(4, mode="full")
    lease = admit(pool, P)
    pool.release(lease)
    assert cached(pool) == lease.pages[2::-1]
    assert pool._pages.free == lease.pages[3:]  # the tail, which no lookup finds


@pytest.mark.parametrize("order", ["lru", "lru-deepest-first", "lfu"])
@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_09_heads_stay_cached(order, capacity):
    pool = BlockPool(4, capacity=capacity, mode="full", order=order)
    lease = admit(pool, [*P[:12], 1, 2, 3, 4])
    live = serve(pool, [*P[:12], 9])  # shares blocks in use, even with no capacity
    pages = lease.pages
    pool.release(lease)
    assert live == 12
    assert sorted(cached(pool)) == sorted(pages[:capacity])
    assert (pool.free, pool.counts.evictions) == (pool.num_blocks - capacity, 4 - capacity)


def test_10_blocks_in_use_are_not_evicted():
    pool = BlockPool(4, num_blocks=12, capacity=6, mode="full")
    serve(pool, P[:12])
    lease = admit(pool, P)
    assert pool.cached == 0 and lease.cached == 12
    for number in range(20):
        serve(pool, list(range(1000 * number, 1000 * number + 24)))
    assert pool.cached == 6 and match(pool, P).pages == lease.pages[:3]


def test_11_the_least_recently_used_is_evicted_first():
    pool = BlockPool(4, mode="full", order="lru-deepest-first")
    a, b = admit(pool, P[:8]), admit(pool, list(range(8)))
    pool.release(a)
    pool.release(b)
    serve(pool, [*P[:8], 1])
    assert cached(pool) == [b.pages[1], b.pages[0], a.pages[1], a.pages[0]]


def test_12_eviction_order_of_two_releases_at_one_time():
    cached_pages = {}
    for order in ("lru-deepest-first", "lru"):
        pool = BlockPool(4, mode="full", order=order, clock=repeat(5).__next__)
        a, b = admit(pool, P[:8]), admit(pool, list(range(12)))
        pool.release(a)
        pool.release(b)
        names = dict(zip(a.pages + b.pages, ("A0", "A1", "B0", "B1", "B2"), strict=True))
        cached_pages[order] = [names[page] for page in cached(pool)]
    assert cached_pages["lru-deepest-first"] == ["B2", "A1", "B1", "A0", "B0"]
    assert cached_pages["lru"] == ["A1", "A0", "B2", "B1", "B0"]


@pytest.mark.parametrize("order", ["lru", "lru-deepest-first", "lfu"])
def test_14_prompts_share_blocks_up_to_their_branch_point(order):
    x, y, z = P[:8], [1, 2, 3, 4], [5, 6, 7, 8]
    pool = BlockPool(4, mode="full", order=order)
    first, second = admit(pool, x + y), admit(pool, x + z)
    assert refs(first) == refs(second) == [2, 2, 1]
    common = first.pages[:2]
    pool.release(first)
    pool.release(second)
    while pool.cached > 2:
        pool._pages.evict()
    assert sorted(cached(pool)) == sorted(common)
    assert match(pool, [*x, 0]).usable == 8


def test_16_nothing_is_found_after_a_gap():
    pool = BlockPool(4, mode="full")
    prompt = pool.hash_prompt(P, ROOT)
    serve(pool, P)
    assert drop_block(pool, prompt.hashes[0]) and not drop_block(pool, prompt.hashes[0])
    matched = pool.match(prompt)
    assert (matched.matched, matched.missed) == (0, {"tail": 2, "evicted": 12})
    assert (pool.entries, pool.cached) == (2, 2)
    lease = admit(pool, P)
    drop_block(pool, prompt.hashes[0])  # while a request uses it
    pool.release(lease)
    assert pool.free + pool.cached == pool.num_blocks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hashing", ["chained", "direct"])
def test_21_equal_hashes_are_not_equal_tokens(mode, hashing):
    pool = BlockPool(4, mode=mode, hashing=hashing, hash=lambda data: b"same")
    first = admit(pool, P[:4])
    colliding = pool.hash_prompt(range(8), ROOT)
    assert pool.match(colliding).missed == {"collision": 8}
    second = admit(pool, range(8))
    assert second.cached == 0 and not set(first.pages) & set(second.pages)
    assert match(pool, [*P[:4], 9]).pages == first.pages  # the first entry stays
    assert pool.entries == 1
    pool.release(second)
    assert pool.free == 2  # blocks that no lookup finds are not cached
    # Roots are compared too, although all hashes are equal.
    assert match(pool, P[:5], root_hash(salt="x")).matched == 0


def test_21_parents_are_compared_by_identity():
    """The second block has the requested tokens and hash, but another parent."""
    pool = BlockPool(1, mode="full", cap=False, hash=lambda data: data[-4:])
    first = admit(pool, [1, 2])
    assert match(pool, [1, 2]).matched == 2
    assert match(pool, [3, 2]).missed == {"cold": 1, "evicted": 1}
    third = admit(pool, [3, 2])
    assert third.published == 1 and match(pool, [3, 2]).missed == {"collision": 1}
    pool.publish(third)
    assert third.published == 1
    pool.release(first)
    pool._pages.evict()  # the other block with this hash is gone
    pool.publish(third)
    assert match(pool, [3, 2]).matched == 2


def test_23_blocks_computed_twice_are_stored_once():
    pool = BlockPool(4, mode="full")
    prompt = pool.hash_prompt(P, ROOT)
    first, second = pool.admit(prompt), pool.admit(prompt)
    assert second.cached == 0 and not set(first.pages) & set(second.pages)
    pool.publish(first)
    twice = second.pages[:3]
    pool.publish(second)
    assert second.pages[:3] == first.pages[:3] and refs(first) == [2, 2, 2, 1]
    assert sorted(pool._pages.free) == sorted(twice) and pool.counts.duplicates == 3
    pool.release(first)
    pool.release(second)
    assert (pool.entries, pool.cached, pool.free) == (3, 3, 5)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("mode", ["alias", "rekey"])
def test_23_lookups_find_one_of_two_equal_tails(mode, later):
    pool = BlockPool(4, mode=mode)
    prompt = pool.hash_prompt(P, ROOT)
    first, second = pool.admit(prompt), pool.admit(prompt)
    pool.publish(first)
    pool.publish(second)
    assert pool.match(prompt).pages == first.pages and second.pages[3] != first.pages[3]
    for lease in (second, first) if later else (first, second):
        for token in (7, 8, 9):  # until the tails are full, and equal again
            pool.append(lease, token)
            pool.publish(lease)
    assert second.pages[:4] == first.pages[:4]
    assert match(pool, P).matched == (14 if mode == "alias" else 12)
    pool.release(first)
    pool.release(second)
    assert pool.cached == pool.entries - (mode == "alias")  # two hashes of one block
    assert match(pool, P).matched == (14 if mode == "alias" else 12)


def test_25_a_cancelled_request_leaves_only_computed_blocks():
    pool = BlockPool(4, mode="alias")
    neighbour = admit(pool, P[:4])
    before = refs(neighbour)
    lease = admit(pool, P, computed=9)
    assert match(pool, P).matched == 8
    pool.release(lease)  # cancelled
    assert refs(neighbour) == before and (pool.entries, pool.cached) == (2, 1)


def test_35_reset_and_double_release():
    pool = BlockPool(4, num_blocks=8)
    lease = admit(pool, P)
    assert not pool.reset() and match(pool, P).matched == 14
    pool.release(lease)
    for use in (pool.release, pool.publish, lambda lease: pool.append(lease, 1)):
        with pytest.raises(RuntimeError, match="released before"):
            use(lease)
    assert pool.reset()
    assert (pool.free, pool.cached, pool.entries) == (8, 0, 0)
    assert match(pool, P).missed == {"cold": 14}
    assert sorted(admit(pool, range(32)).pages) == list(range(8))


@pytest.mark.parametrize("order", ["lru", "lru-deepest-first", "lfu"])
def test_copying_a_tail_counts_as_use(order):
    pool = BlockPool(4, order=order)
    first = admit(pool, P)
    pool.release(first)
    reader = admit(pool, range(12))
    pool.release(reader)
    serve(pool, P)
    assert cached(pool) == reader.pages[::-1] + first.pages[::-1]


@pytest.mark.parametrize("mode", MODES)
def test_publishing_less_than_before_changes_nothing(mode):
    pool = BlockPool(4, mode=mode)
    lease = admit(pool, P)
    before = pool.entries, match(pool, P).matched
    for computed in (9, 0, None, 99):
        pool.publish(lease, computed)
        assert (pool.entries, match(pool, P).matched) == before


def test_without_free_pages_the_tail_is_evicted_instead_of_copied():
    pool = BlockPool(4, num_blocks=4)
    serve(pool, P)
    lease = admit(pool, P)
    assert lease is not None and lease.cached == 12 and not lease.copies
    assert pool.counts.lookups.missed["evicted"] == 2


def test_admission_allocates_blocks_for_extra_tokens():
    pool = BlockPool(4, num_blocks=6)
    lease = admit(pool, P, extra_tokens=10)
    assert (len(lease.blocks), pool.free) == (6, 0)
    assert all(pool.append(lease, token) for token in range(10))
    assert not pool.append(lease, 10) and lease.length == 24
    assert pool.admit(pool.hash_prompt(P, ROOT), extra_tokens=10) is None
    pool.publish(lease)
    pool.release(lease)
    assert pool.cached == 6


def test_growth_evicts_unused_blocks():
    pool = BlockPool(4, num_blocks=5, mode="full")
    serve(pool, P[:8])
    lease = admit(pool, range(12))
    assert pool.append(lease, 1) and pool.counts.evictions == 1
    assert match(pool, P).matched == 4


@pytest.mark.parametrize(
    "wrong", [{"mode": "half"}, {"order": "random"}, {"hashing": "crc"}, {"num_blocks": 0},
              {"capacity": -1}, {"block_size": 0}, {"ghosts": 1}, {"order": ["lru"]},
              {"mode": None}],
)  # fmt: skip
def test_settings_are_checked(wrong, unchecked):
    with pytest.raises(UserError, match="got"):
        BlockPool(**{"block_size": 4} | wrong)


def test_a_prompt_in_all_pages_is_found_in_part():
    """The last token must be recomputed, and no page is free for that."""
    pool = BlockPool(4, num_blocks=3, mode="full")
    first = admit(pool, P[:12])
    again = pool.admit(pool.hash_prompt(P[:12], ROOT), partly=True)
    assert (again.cached, again.pages) == (8, first.pages[:2])
    assert pool.admit(pool.hash_prompt(P[4:], ROOT), partly=True).pages == []
    assert pool.admit(pool.hash_prompt(P[:12], ROOT)) is None
