"""The division of memory into weights, sequences and prefixes."""

from __future__ import annotations

import gc

import jax
import pytest

from jaxkv.defaults import MAX_BATCH, PREFIX_MEMORY
from jaxkv.errors import UserError
from jaxkv.serve.engine import Engine, PrefixConfig
from jaxkv.serve.engine.plan import EngineBytes, plan_memory, sizes
from tests.seldom import seldom
from tests.serve.engine.plain import plain

SIZES = EngineBytes(weights=1000, prefills=50, sequence=100, prefix=40)


@pytest.mark.parametrize(
    "memory, max_batch, prefixes, free, expected",
    [
        (None, None, None, None, (None, MAX_BATCH, PREFIX_MEMORY)),
        (1150, None, None, None, (1150, 1, 0)),
        (1390, None, None, None, (1390, 3, 40)),  # sequences first
        (1389, None, None, None, (1389, 3, 0)),  # no prefix fits
        (9999, None, None, 10**4, (9999, MAX_BATCH, 9999 - 1050 - 1600)),
        (None, None, None, 10**10, (9 * 10**9, MAX_BATCH, PREFIX_MEMORY)),
    ],
)
def test_plans(memory, max_batch, prefixes, free, expected):
    assert tuple(plan_memory(SIZES, memory, max_batch, prefixes, free)) == expected


@pytest.mark.parametrize(
    "memory, max_batch, prefixes, free, words",
    [
        (1149, None, None, None, ["weights (1000 bytes)", "1 sequence (150 bytes)", "1.1 KiB"]),
        (1349, 3, None, None, ["3 sequences", "--max-batch", "--memory 1MiB"]),
        (1249, None, 100, None, ["prefixes (100 bytes)", "--prefix-memory"]),
        (None, None, None, 1200, ["90% of the free memory", "give a smaller policy (under"]),
        (1500, None, None, 1499, ["--memory must be at most what is free", "1.5 KiB"]),
        (9999, None, 39, None, ["--prefix-memory must hold one prefix (40 bytes)", "39 bytes"]),
    ],
)
def test_too_little_memory(memory, max_batch, prefixes, free, words):
    with pytest.raises(UserError) as raised:
        plan_memory(SIZES, memory, max_batch, prefixes, free)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    "memory, max_batch, expected",
    [
        (1150, None, (1150, 1, 0)),
        (1350, None, (1350, 2, 0)),  # batches of 1 and of 2
        (1649, None, (1649, 4, 99)),
        (9999, 16, (9999, 16, 9999 - 1050 - 2100)),
    ],
)
def test_a_batch_that_grows_is_in_memory_in_all_its_sizes(memory, max_batch, expected):
    assert plan_memory(SIZES, memory, max_batch, fixed_batch=False) == expected
    with pytest.raises(UserError, match=r"1 and 4 and 16 sequences \(2.1 KiB\).* or --fixed-batch"):
        plan_memory(SIZES, 3149, 16, fixed_batch=False)
    with pytest.raises(UserError, match=r"MiB or a smaller --max-batch$"):
        plan_memory(SIZES, 2649, 16, fixed_batch=False)


def test_prefixes_on_the_host_take_memory_of_a_cpu():
    assert plan_memory(SIZES, 1390, host_prefixes=100) == (1390, 2, 40)
    with pytest.raises(UserError, match=r"prefixes on the host \(300 bytes\).*--prefix-host-mem"):
        plan_memory(SIZES, 1390, host_prefixes=300)


@pytest.fixture
def shared_programs():
    """Each engine compiles its own: the memory of a shared pool would be counted twice."""


@pytest.mark.parametrize(
    "policy", ["full", "streaming:sinks=2,window=14", seldom("balance-stream")]
)
@pytest.mark.parametrize("spare", [0, 10])
def test_an_engine_keeps_to_its_plan(policy, spare):
    """spare: prefixes."""
    model = plain(policy)
    nbytes = sizes(model, None, 16)
    memory = nbytes.weights + nbytes.prefills + 3 * nbytes.sequence + spare * nbytes.prefix
    plan = plan_memory(nbytes, memory, 3)
    assert plan.prefixes == spare * nbytes.prefix
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    config = PrefixConfig(memory=plan.prefixes) if plan.prefixes else None
    engine = Engine(model, plan.max_batch, chunk=16, prefix_cache=config)
    assert sum(engine.bytes.values()) == memory
    held = sum(array.nbytes for array in jax.live_arrays()) - before
    assert held == memory - nbytes.weights - nbytes.prefills
    if spare:
        assert engine.metrics()["prefix_entries"] == spare
