"""The times of sampled caches, at a tiny size."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest

from jaxkv import models
from jaxkv.evals.reservoir import sampled

CACHES = {
    "reservoir": "reservoir:sinks=1,window=6,sample=8",
    "balance-stream": "balance-stream:sinks=1,window=6,levels=2,block=4",
}
GIVEN = Namespace(written=20, prompt=640, rounds=2, quick=True)


@pytest.fixture(scope="module")
def compress(shared):
    """One layer: quick to compile."""
    llm = models.load(shared / "models" / "stories260K")
    return replace(llm, config=replace(llm.config, layers=1, windows=(None,)))


@pytest.fixture
def few_slots(monkeypatch):
    monkeypatch.setattr(sampled, "CACHES", CACHES)
    monkeypatch.setattr(sampled, "SLOTS", 15)
    monkeypatch.setattr(sampled, "STREAMING", "streaming:sinks=1,window=14")


@pytest.mark.slow
def test_each_cache_is_timed_against_streaming(compress, few_slots):
    results = sampled.token(compress, GIVEN)
    assert set(results["ratio"]) == set(CACHES) and set(results["microseconds"]) > set(CACHES)
    assert results["bars"][0]["value"] == results["ratio"]["balance-stream"]


@pytest.mark.slow
def test_every_round_compresses_the_same_prompt(compress):
    pytest.importorskip("torch", reason="no torch: pip install --group peers")
    results = sampled.time_compression(compress, GIVEN)
    assert results["share"]["median"] > 0
    prompt_bytes, bytes_after = results["state_bytes"]  # equal in every round
    assert bytes_after < prompt_bytes / 2
