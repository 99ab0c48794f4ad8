"""Level occupancy: which levels are filled, and how many tokens each token represents."""

import jax.numpy as jnp
import numpy as np

from jaxkv.policies.merge_reduce import occupancy, tree
from jaxkv.policies.merge_reduce.occupancy import TreeSize


def test_occupancy_follows_the_binary_digits_of_the_number_of_blocks():
    """t = 8, after each of 10,000 tokens: level l >= 1 has t/2 tokens if bit l-1 of the number of
    blocks is set, otherwise none. The multiplicities add up to the length of the stream."""
    size = TreeSize(levels=12, block=8)
    num_evicted = jnp.arange(10_001, dtype=jnp.uint32)
    fills = np.asarray(occupancy.filled_per_level(size, num_evicted))
    batches = np.arange(10_001) // 8
    assert (fills[:, 0] == np.arange(10_001) % 8).all()
    for level in range(1, 11):
        assert (fills[:, level] == 4 * ((batches >> (level - 1)) & 1)).all()
    assert (fills @ 2 ** np.arange(12) == np.arange(10_001)).all()
    for after, expected in {1: [0, 4, 0, 0, 0], 5: [0, 4, 0, 4, 0], 13: [0, 4, 0, 4, 4]}.items():
        assert fills[8 * after, :5].tolist() == expected


def test_when_the_last_level_is_full_every_multiplicity_doubles():
    size = TreeSize(levels=3, block=8)
    num_evicted = jnp.asarray([31, 32, 33, 47, 48, 63, 64, 2**31 - 1, 2**31], jnp.uint32)
    raised = np.asarray(occupancy.log2_group_size(size, num_evicted))
    assert raised.tolist()[:7] == [0, 1, 1, 1, 1, 1, 2]
    fills = np.asarray(occupancy.filled_per_level(size, num_evicted))
    assert fills[:7].tolist() == [
        [7, 4, 4], [0, 0, 4], [1, 0, 4], [8, 0, 4], [0, 4, 4], [8, 4, 4], [0, 0, 4]
    ]  # fmt: skip
    # Where no group is incomplete, the multiplicities add up to all tokens.
    for m in (32, 34, 46, 48, 62, 64, 2**30):
        count = jnp.asarray([m], jnp.uint32)
        times = 2.0 ** (np.arange(3) + int(occupancy.log2_group_size(size, count)[0]))
        assert np.asarray(occupancy.filled_per_level(size, count))[0] @ times == m


def test_the_count_is_halved_after_two_billion_tokens():
    size = TreeSize(levels=3, block=8)
    at = [tree.HALVE_COUNT_AT - np.uint32(1), tree.HALVE_COUNT_AT // np.uint32(2)]
    before, halved = (jnp.asarray([x], jnp.uint32) for x in at)
    assert int(occupancy.log2_group_size(size, before)[0]) == int(
        occupancy.log2_group_size(size, halved)[0]
    )
    filled = np.asarray(occupancy.filled_per_level(size, halved))[0]
    assert filled.tolist() == [0, 0, 4]
