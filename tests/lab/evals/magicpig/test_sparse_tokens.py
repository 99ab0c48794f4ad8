"""The speed of MagicPIG after a long prompt, at a tiny size."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest

from jaxkv import models
from jaxkv.evals.lib.state_sizes import prefilled_bytes
from jaxkv.evals.magicpig import sparse_tokens
from jaxkv.evals.magicpig.inclusion import isotropic
from jaxkv.policy_spec import parse_policy


@pytest.fixture(scope="module")
def llm():
    """One layer of the default model: quick to compile."""
    model = models.load()
    return replace(model, config=replace(model.config, layers=1, windows=(None,)))


def test_a_filled_cache_can_be_decoded_from(llm, monkeypatch):
    monkeypatch.setattr(sparse_tokens, "random_llama", lambda _: (llm, None))
    options = Namespace(written=4, rounds=2)
    results = sparse_tokens.measure_size({"layers": 1}, 600, options)
    assert results["layers"] == 1 and results["times_faster"]["n"] == 2
    assert results["state_bytes"]["magicpig"] > results["state_bytes"]["full"]
    # Queries span more dimensions than keys.
    assert isotropic(10, 150, 64) < results["share_attended"]["mean"] < isotropic(10, 150, 8)


def test_prefilled_bytes_are_those_of_a_stream(llm):
    for text in (
        "magicpig:K=4,L=20,sinks=4,window=8,start=72,tail=1",
        "snapkv:capacity=36",
    ):
        stream = models.Stream(llm, text, tokens=72)
        stream.prefill([list(range(3, 75))], 72)
        stream.finish_prefill()
        assert stream.state_bytes == prefilled_bytes(parse_policy(text), llm.spec, 72)
