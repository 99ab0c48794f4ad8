"""The cost of a token by text length."""

from __future__ import annotations

import pytest

from jaxkv import models
from jaxkv.colab import cost_by_length, runtime


@pytest.fixture(scope="module")
def llm():
    return models.load()


@pytest.mark.slow
def test_costs_are_measured_at_each_length(llm):
    names, lengths = ["full:start=16", "streaming:sinks=2,window=14"], [16, 40]
    costs = cost_by_length.measure(llm, runtime.passage(llm, 40), names, lengths, new=4, count=1)
    full, streaming = (costs[name] for name in names)
    assert [cost.tokens for cost in full] == lengths
    assert full[1].state_bytes > 1.9 * full[0].state_bytes
    assert streaming[0].state_bytes == streaming[1].state_bytes
    assert all(cost.microseconds > 0 for cost in (*full, *streaming))
    assert cost_by_length.draw(costs, "a caption").png.startswith(b"\x89PNG")
