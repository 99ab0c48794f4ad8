"""An engine that the tests of one file share, and programs that all engines of a process share."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxkv.serve.engine import Engine, tiers
from jaxkv.serve.engine import engine as module
from jaxkv.serve.engine.programs import Programs
from jaxkv.serve.engine.tiers import DevicePool
from tests.serve.engine.plain import plain


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(plain(), max_batch=4, chunk=16, max_prefill_tokens=32)


@pytest.fixture(autouse=True)
def shared_programs(monkeypatch):
    """Engines with equal settings share their programs: most of their start is compilation."""
    monkeypatch.setattr(module, "Programs", programs_of)
    monkeypatch.setattr(tiers, "DevicePool", pool_of)


# Those of a dozen engines have about 17,000 memory maps, of 65,530 that a process may have.
compiled = functools.lru_cache(maxsize=12)(Programs)


def programs_of(*settings) -> Programs:
    shared = compiled(*settings)
    programs = copy.copy(shared)  # it counts its own programs
    programs.shared = shared
    return programs


@functools.lru_cache(maxsize=12)
def compiled_pool(layout, programs, *settings) -> tuple[DevicePool, int]:
    before = programs.num_compiled
    pool = DevicePool(layout, programs, *settings)
    added, programs.num_compiled = programs.num_compiled - before, before
    return pool, added


def pool_of(layout, programs, *settings) -> DevicePool:
    shared, added = compiled_pool(layout, programs.shared, *settings)
    programs.num_compiled += added
    pool = copy.copy(shared)
    pool._pool = jax.tree.map(jnp.copy, shared._pool)  # programs of the pool donate it
    return pool
