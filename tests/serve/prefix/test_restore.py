"""Blocks that a caller restores from elsewhere while a prompt is admitted."""

from __future__ import annotations

import pytest

from jaxkv.serve.prefix import BlockPool
from tests.serve.prefix.prompts import ROOT, P, match, serve


def restoring(pool: BlockPool, tokens: list[int], stored_blocks: set[int]):
    """Admit a prompt of which these block numbers can be restored; returns lease and asked."""
    asked = []

    def restore(prompt, number, page):
        assert prompt.blocks[number] and 0 <= page < pool.num_blocks
        asked.append(number)
        return number in stored_blocks

    prompt = pool.hash_prompt(tokens, ROOT)
    extra = -(len(tokens) % pool.block_size)
    return pool.admit(prompt, extra, partly=True, restore=restore), asked


@pytest.mark.parametrize(
    "size, stored_blocks, cached, asked",
    [
        (14, {0, 1, 2}, 12, [0, 1, 2]),
        (14, {0, 1}, 8, [0, 1, 2]),
        (14, {1, 2}, 0, [0]),
        (12, {0, 1, 2}, 8, [0, 1]),  # the last token is computed
        (3, {0}, 0, []),
    ],
)
def test_leading_blocks_are_restored(size, stored_blocks, cached, asked):
    pool = BlockPool(4, 8, mode="full")
    lease, asked_blocks = restoring(pool, P[:size], stored_blocks)
    assert (lease.cached, asked_blocks) == (cached, asked)
    assert match(pool, P[:size]).matched == cached, "others find them at once"
    lookups = pool.counts.lookups
    assert (lookups.tokens, lookups.tokens_hit) == (size, cached)
    assert sum(lookups.missed.values()) == size - cached
    assert lookups.requests_hit == (cached > 0)
    pool.publish(lease)
    pool.release(lease)
    assert serve(pool, P[:size]) == (size - 1) // 4 * 4


def test_blocks_in_memory_are_not_restored():
    pool = BlockPool(4, 8, mode="full")
    assert serve(pool, P[:9]) == 0
    lease, asked = restoring(pool, P, {0, 1, 2})
    assert asked == [2] and lease.cached == 12
    pool.release(lease)


def test_a_prompt_is_restored_as_far_as_pages_are_free():
    pool = BlockPool(4, 2, mode="full")
    lease, asked = restoring(pool, P, {0, 1, 2})
    assert asked == [0, 1] and lease.cached == 8 and len(lease.pages) == 2
    pool.release(lease)
    assert serve(pool, P[:8]) == 4
